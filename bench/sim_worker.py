"""A worker without a model whose pool stores what each slot means, so that any wrong read is caught on a CPU.

Every slot holds the hash of the token history up to its position. A step writes the slots it computes, then checks
every slot it would read against the request's own history. The "model" is a hash of the history, so the right output of
a request is known without running it. Written without sharing code with worker/batch.py: the two check each other.
"""
from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from ipc.messages import EMPTY, KeptRow, ModelRunnerOutput, SchedulerOutput, WorkerReady

MASK = (1 << 61) - 1


def extend_history(h: int, token: int) -> int:
    """Hash of a history with one more token."""
    return (h * 6364136223846793005 + token * 1442695040888963407 + 1013904223) & MASK


def next_token(h: int, vocab_size: int) -> int:
    """What this model samples after history `h`."""
    return (h >> 13) % vocab_size


def expected_outputs(prompt: list[int], count: int, vocab_size: int, stop: frozenset[int] = frozenset(),
                     min_tokens: int = 0) -> list[int]:
    """The output of a request alone: at most `count` tokens, up to and with the first stop token after min_tokens."""
    h = 0
    for token in prompt:
        h = extend_history(h, token)
    outputs: list[int] = []
    while len(outputs) < count:
        token = next_token(h, vocab_size)
        outputs.append(token)
        if token in stop and len(outputs) >= min_tokens:
            break
        h = extend_history(h, token)
    return outputs


@dataclasses.dataclass(slots=True)
class SimRow:
    request_id: int
    tokens: list[int]
    history: list[int]                          # history[p]: hash of tokens[:p + 1]
    computed: int
    blocks: list[int]
    is_reusable: bool = True

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.history.append(extend_history(self.history[-1], token))


class WrongReadError(AssertionError):
    """A step would have read a slot that does not hold the request's own history."""


class SimWorker:
    """Executes plans. `num_blocks` usable blocks as in WorkerReady."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int, vocab_size: int,
                 num_speculative_tokens: int = 0) -> None:
        self.block_size, self.vocab_size = block_size, vocab_size
        self.num_speculative_tokens = num_speculative_tokens
        self.pool = [[-1] * block_size for _ in range(num_blocks + 1)]
        self.host = [[-1] * block_size for _ in range(num_host_blocks)]
        self.rows: list[SimRow] = []
        self.needs_reset = False
        self.num_checked_slots = 0

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Raises WrongReadError when the plan reads what is not there."""
        self.apply(plan)
        counts: dict[int, int] = {row: n for row, n in np.frombuffer(plan.counts, np.int32).reshape(-1, 2).tolist()}
        size, pool = self.block_size, self.pool
        drafts: dict[int, list[int]] = {}
        for index, token in np.frombuffer(plan.spec_token_ids, np.int32).reshape(-1, 2).tolist():
            drafts.setdefault(index, []).append(token)
        for index, proposed in drafts.items():
            row = self.rows[index]
            if row.computed + 1 != len(row.tokens) or counts[index] != 1 + len(proposed):
                raise WrongReadError(f"step {plan.step}: {row.request_id} verifies {proposed} at {row.computed} of "
                                     f"{len(row.tokens)} tokens, {counts[index]} computed")
            row.extend(proposed)
        work = []
        for index, row in enumerate(self.rows):
            n = counts.get(index, 1)
            if n == 0:
                continue
            end = row.computed + n
            if end > len(row.tokens):
                raise WrongReadError(f"step {plan.step}: {row.request_id} computes {end} of {len(row.tokens)} tokens")
            for p in range(row.computed, end):
                block = row.blocks[p // size]
                if block == 0:
                    raise WrongReadError(f"step {plan.step}: {row.request_id} writes the null block")
                pool[block][p % size] = row.history[p]
            row.computed = end
            work.append((index, row))
        tokens = [-1] * len(self.rows)
        accepted: list[int] = []
        proposals: list[int] = []
        for index, row in work:
            self._check(plan.step, row)
            if row.computed == len(row.tokens):
                got = self._verify(row, drafts.get(index, []))
                tokens[index] = got[0]
                accepted += [x for token in got[1:] for x in (index, token)]
                proposals += [x for token in self._propose(row) for x in (index, token)]
        return ModelRunnerOutput(plan.step, np.array(tokens, np.int32).data.cast("B"), EMPTY,
                                 accepted=np.array(accepted, np.int32).data.cast("B") if accepted else EMPTY,
                                 spec_token_ids=np.array(proposals, np.int32).data.cast("B") if proposals else EMPTY)

    def _verify(self, row: SimRow, drafts: list[int]) -> list[int]:
        """The right tokens after the row's newest, as far as the drafts were right, and one more."""
        known = len(row.tokens) - len(drafts)
        got: list[int] = []
        for i in range(len(drafts) + 1):
            got.append(next_token(row.history[known - 1 + i], self.vocab_size))
            if i < len(drafts) and got[i] != drafts[i]:
                break
        del row.tokens[known:], row.history[known:]
        row.extend(got)
        if drafts:
            row.computed = len(row.tokens) - 1
            del row.blocks[-(-len(row.tokens) // self.block_size):]
        return got

    def _propose(self, row: SimRow) -> list[int]:
        """Drafts that depend on the history alone: none, right ones, and such that go wrong somewhere."""
        limit, h = self.num_speculative_tokens, row.history[-1]
        if not limit or h % 3 == 0:
            return []
        found, num_right = [], h // 3 % (limit + 1)
        for i in range(1 + h // 100 % limit):
            token = next_token(h, self.vocab_size)
            found.append(token if i < num_right else (token + 1) % self.vocab_size)
            h = extend_history(h, found[-1])
        return found

    def _check(self, step: int, row: SimRow) -> None:
        size, pool, history = self.block_size, self.pool, row.history
        for i in range(-(-row.computed // size)):
            start, stop = i * size, min((i + 1) * size, row.computed)
            held = pool[row.blocks[i]]
            if held[:stop - start] != history[start:stop]:
                raise WrongReadError(f"step {step}: {row.request_id} reads block {row.blocks[i]} (its {i}.) that holds "
                                     "another history")
        self.num_checked_slots += row.computed

    def drop_rows(self) -> None:
        """A new core said Hello; the pool stays."""
        self.rows.clear()
        self.needs_reset = False

    def kept(self, ready: WorkerReady) -> WorkerReady:
        """What it would tell a new core."""
        rows: list[SimRow] = [] if self.needs_reset else self.rows
        size = self.block_size
        unsound = {b for row in rows if not row.is_reusable for b in row.blocks[:-(-row.computed // size)]}
        kept: list[KeptRow] = []
        tokens: list[int] = []
        blocks: list[int] = []
        for row in rows:
            count = 0
            while count < row.computed and row.is_reusable and row.blocks[count // size] not in unsound:
                count += 1
            if count:
                kept.append(KeptRow(row.request_id, count))
                tokens += row.tokens[:count]
                blocks += row.blocks[:-(-count // size)]
        return msgspec.structs.replace(ready, kept=kept, kept_tokens=np.array(tokens, np.int32).data.cast("B"),
                                       kept_blocks=np.array(blocks, np.int32).data.cast("B"))

    def apply(self, plan: SchedulerOutput) -> None:
        """The ops of a plan, in order."""
        if plan.reset:
            self.rows.clear()
            self.needs_reset = False
        if self.needs_reset:
            raise WrongReadError(f"step {plan.step} arrived after a failed step without reset")
        pairs = {name: np.frombuffer(getattr(plan, name), np.int32).reshape(-1, 2).tolist()
                 for name in ("moves", "swap_out", "copies", "swap_in", "extend", "advance")}
        for row, last in pairs["moves"]:
            if last != len(self.rows) - 1:
                raise WrongReadError(f"step {plan.step}: move from row {last}, the last is {len(self.rows) - 1}")
            self.rows[row] = self.rows[last]
            self.rows.pop()
        if plan.stale:
            for old in self.rows:
                old.is_reusable = False
        gathered = ([(slot, list(self.pool[block])) for block, slot in pairs["swap_out"]],
                    [(target, list(self.pool[source])) for source, target in pairs["copies"]],
                    [(block, list(self.host[slot])) for slot, block in pairs["swap_in"]])
        for slot, content in gathered[0]:
            self.host[slot] = content
        for block, content in (*gathered[1], *gathered[2]):
            self.pool[block] = content
        tokens: list[int] = np.frombuffer(plan.new_tokens, np.int32).tolist()
        blocks: list[int] = np.frombuffer(plan.new_blocks, np.int32).tolist()
        for new in plan.new:
            mine, tokens = tokens[:new.num_tokens], tokens[new.num_tokens:]
            table, blocks = blocks[:new.num_blocks], blocks[new.num_blocks:]
            history, h = [], 0
            for token in mine:
                h = extend_history(h, token)
                history.append(h)
            self.rows.append(SimRow(new.request_id, mine, history, new.num_computed_tokens, table,
                                    new.is_reusable))
        for row, block in pairs["extend"]:
            self.rows[row].blocks.append(block)
        for row, n in pairs["advance"]:
            self.rows[row].computed += n
        if len(self.rows) != plan.num_rows:
            raise WrongReadError(f"step {plan.step}: {len(self.rows)} rows, the plan says {plan.num_rows}")
