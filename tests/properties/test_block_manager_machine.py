"""The block manager against a plain model, under any sequence of calls.

I1 each block is free or referenced, never both, and its count is the number of its owners. I2 a hash in the map names a
block that holds it. I3 a table holds neither the null block nor a block twice. I4 a refused call changes nothing. I5 a
hash always names the content it was published for.
"""
from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_core.block_manager import BlockManager, HostPool

NAMES = [bytes([i]) for i in range(6)]          # stand for the hashes of a short chain


class BlockManagerMachine(RuleBasedStateMachine):
    """The model: who owns what, the free queue as a list, and the content of every block."""

    @initialize(num_blocks=st.integers(1, 8), caching=st.booleans())
    def start(self, num_blocks: int, caching: bool) -> None:
        self.blocks = BlockManager(num_blocks, 4, caching)
        self.tables: list[list[int]] = []
        self.queue = list(range(1, num_blocks + 1))
        self.content: dict[int, bytes] = {}     # block -> the hash it was published for, while it may be found

    def state(self) -> tuple:
        blocks = self.blocks
        return (list(blocks.ref_count), list(blocks.block_hash), list(blocks.free_queue), dict(blocks.cached))

    def owners(self, block: int) -> int:
        return sum(block in table for table in self.tables)

    @rule(count=st.integers(0, 5), stop=st.integers(0, 6))
    def allocate(self, count: int, stop: int) -> None:
        adopt = self.blocks.find_cached_prefix(NAMES, 0, stop)
        assert [self.content.get(block) for block in adopt] == NAMES[:len(adopt)]           # I5
        before, free = self.state(), [block for block in self.queue if block not in adopt]
        got = self.blocks.allocate(count, adopt)
        if count > len(free):
            assert got is None and self.state() == before                                   # I4
            return
        assert got == free[:count]              # the least recently freed first, never an adopted one
        self.queue = free[count:]
        for block in got:
            self.content.pop(block, None)       # evicted
        self.tables.append([*adopt, *got])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.blocks.free(table)
        self.queue += [block for block in reversed(table) if not self.owners(block)]        # tail first

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def publish(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from([table for table in self.tables if table]))))
        is_new = self.blocks.enable_prefix_caching and block not in self.content and name not in self.content.values()
        assert self.blocks.publish(block, name) == is_new
        if is_new:
            self.content[block] = name

    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(1, self.blocks.num_blocks))
        self.blocks.unpublish(block)
        self.content.pop(block, None)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        keep = data.draw(st.integers(0, len(table)))
        gone = table[keep:]
        self.blocks.trim(table, keep)           # in place
        left = [block for block in gone if not self.owners(block)]
        self.queue[:0] = reversed(left)
        for block in left:
            self.content.pop(block, None)

    @rule()
    def forget(self) -> None:
        self.blocks.forget()
        self.content.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        blocks = self.blocks
        blocks.check_invariants(self.tables)                                                # I1, I2, I3
        assert list(blocks.free_queue) == self.queue
        assert blocks.ref_count[1:] == [self.owners(block) for block in range(1, blocks.num_blocks + 1)]
        assert blocks.cached == {name: block for block, name in self.content.items()}

    def teardown(self) -> None:
        if hasattr(self, "tables"):
            for table in self.tables:
                self.blocks.free(table)
            assert self.blocks.num_free == self.blocks.num_blocks


class HostPoolMachine(RuleBasedStateMachine):
    """Host slots: all or none, and none twice before the plan that may still read it has passed."""

    @initialize(num_slots=st.integers(0, 6))
    def start(self, num_slots: int) -> None:
        self.host = HostPool(num_slots)
        self.held: list[list[int]] = []
        self.returned = 0

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        free = self.host.num_free
        slots = self.host.take(count)
        if count > free:
            assert slots is None and self.host.num_free == free
        else:
            assert slots is not None and len(slots) == count
            self.held.append(slots)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slots = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.host.give_back(slots)
        self.returned += len(slots)

    @rule()
    def next_plan(self) -> None:
        self.host.next_plan()
        self.returned = 0

    @invariant()
    def every_slot_is_somewhere_once(self) -> None:
        self.host.check_invariants(self.held)
        assert self.host.num_free == self.host.num_slots - sum(map(len, self.held)) - self.returned


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestHostPool = HostPoolMachine.TestCase
TestHostPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
