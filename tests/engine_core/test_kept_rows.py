"""A new core over the pool of a former one: which blocks a re-added request finds, and which nobody does."""
from __future__ import annotations

import msgspec
import pytest

from bench.simulation import over_the_wire, pack
from engine_core.snapshot import Origin, restore, take
from ipc.messages import EMPTY, Command, KeptRow
from tests.engine_core.test_recovery import alone
from tests.engine_core.test_scheduler import prompt
from tests.engine_core.tools import KEY, Engine, add_message


def successor(old: Engine, **options) -> Engine:
    """An engine whose core is new and whose worker is the old one's."""
    new = Engine(**options)
    ready = over_the_wire(old.worker.kept(new.core.ready))
    new.core.kept.take(ready, new.blocks)
    old.worker.drop_rows()
    new.worker = old.worker
    return new


def add_again(engine: Engine, request_id: int, tokens: list[int], outputs: list[int], **options) -> None:
    message = add_message(request_id, tokens, outputs=tuple(outputs), max_tokens=12, **options)
    engine.core.handle(0, over_the_wire(msgspec.structs.replace(message, is_replay=True)))
    engine.tokens[request_id] = list(outputs)


def running(num_steps: int = 4, **options) -> Engine:
    engine = Engine(**options)
    engine.add(1, prompt(10), max_tokens=12)
    engine.add(2, prompt(10, 20), max_tokens=12, salt="a")
    for _ in range(num_steps):
        engine.step()
    return engine


def computed(engine: Engine) -> int:
    """Tokens of the plan that the new rows begin with."""
    return sum(row.num_computed_tokens for row in engine.step().new)


def test_what_the_worker_computed_is_not_computed_again():
    old = running()                             # 10 + 4 tokens, of which 13 are computed: three full blocks of four
    new = successor(old)
    add_again(new, 1, prompt(10), old.tokens[1])
    add_again(new, 2, prompt(10, 20), old.tokens[2], salt="a")
    assert computed(new) == 24
    new.run()
    assert new.tokens[1] == alone(1, prompt(10), 12) and new.tokens[2] == alone(2, prompt(10, 20), 12)
    assert (new.stats.num_replayed_tokens, new.stats.num_replayed_hit_tokens) == (28, 24)
    assert new.stats.num_queried_tokens == 0    # its own work is no hit
    new.assert_idle()


def test_the_unfilled_last_block_is_copied():
    old = running(partial=True)
    new = successor(old, partial=True)
    add_again(new, 1, prompt(10), old.tokens[1])
    assert computed(new) == 13
    new.run()
    assert new.tokens[1] == alone(1, prompt(10), 12)


def test_tokens_that_were_computed_and_never_received_are_computed_again():
    old = running(num_steps=6)
    new = successor(old)
    add_again(new, 1, prompt(10), old.tokens[1][:1])
    assert computed(new) == 8
    new.run()
    assert new.tokens[1] == alone(1, prompt(10), 12)


def test_a_request_that_comes_back_with_other_tokens_gets_the_common_part_only():
    old = running()
    new = successor(old)
    other = [*prompt(10)[:6], 49, 48, 47, 46]
    add_again(new, 1, other, [])
    assert computed(new) == 4
    new.run()
    assert new.tokens[1] == alone(1, other, 12)


@pytest.mark.parametrize("request_id,salt", [(3, ""), (1, "b")])
def test_blocks_belong_to_the_request_and_its_salt(request_id: int, salt: str):
    """Another request with the same prompt finds nothing before the owner is back, nor ever under another salt."""
    old = running()
    new = successor(old)
    if request_id == 1:
        add_again(new, 2, prompt(10, 20), old.tokens[2], salt="a")
        new.run()
        new.add(4, prompt(10, 20), salt=salt)
    else:
        new.add(request_id, prompt(10), salt=salt)
    new.step()
    assert new.admitted[4 if request_id == 1 else 3][0] == 0


def test_others_of_its_salt_find_the_blocks_once_it_is_back():
    old = running()
    new = successor(old)
    add_again(new, 1, prompt(10), old.tokens[1])
    new.add(3, prompt(10))
    new.step()
    assert new.admitted[3][0] == 8
    new.run()
    assert new.tokens[3] == alone(3, prompt(10), 4)


def test_blocks_that_were_handed_out_meanwhile_are_lost():
    old = running(num_blocks=12)
    new = successor(old, num_blocks=12)
    new.add(3, prompt(46, 3), max_tokens=2)     # its last block is not full, so it has no hash
    new.step()
    add_again(new, 2, prompt(10, 20), old.tokens[2], salt="a")
    add_again(new, 1, prompt(10), old.tokens[1])
    new.run()
    assert new.stats.num_replayed_hit_tokens == 0
    assert new.tokens[1] == alone(1, prompt(10), 12) and new.tokens[2] == alone(2, prompt(10, 20), 12)
    new.assert_idle()


def test_a_reset_of_the_prefix_cache_holds_across_a_restart():
    old = running(num_steps=2)
    old.core.handle(0, Command(1, "reset_prefix_cache"))
    assert old.step().stale and not old.step().stale
    old.add(3, prompt(10, 33), max_tokens=12)
    old.step()
    new = successor(old)
    assert list(new.core.kept.rows) == [3]
    add_again(new, 1, prompt(10), old.tokens[1])
    assert computed(new) == 0


def test_a_prompt_that_is_needed_whole_is_computed_whole():
    old = Engine()
    old.add(1, prompt(10), prompt_logprobs=0, max_tokens=12)
    old.step()
    old.step()
    new = successor(old)
    assert not new.core.kept.rows
    add_again(new, 1, prompt(10), old.tokens[1], prompt_logprobs=0)
    assert computed(new) == 0


def test_a_failed_step_leaves_nothing_to_keep():
    old = running()
    old.worker.needs_reset = True
    assert not successor(old).core.kept.rows


def test_a_new_reset_forgets_what_was_kept():
    old = running()
    new = successor(old)
    new.core.handle(0, Command(1, "reset_prefix_cache"))
    add_again(new, 1, prompt(10), old.tokens[1])
    assert computed(new) == 0


def test_without_a_prefix_cache_nothing_is_kept():
    old = running(caching=False)
    new = successor(old, caching=False)
    add_again(new, 1, prompt(10), old.tokens[1])
    assert computed(new) == 0 and not new.core.kept.rows


def test_columns_that_do_not_fit_are_refused():
    new = Engine()
    ready = msgspec.structs.replace(new.core.ready, kept=[KeptRow(1, 5)], kept_tokens=pack([1, 2]), kept_blocks=EMPTY)
    with pytest.raises(RuntimeError, match="rows have 5 tokens in 2 blocks; it sent 2 and 0"):
        new.core.kept.take(ready, new.blocks)


def test_a_snapshot_holds_what_is_kept():
    old = running()
    new = successor(old)
    core = restore(Origin(new.core.config, new.cache, new.core.ready, KEY), take(new.core).encode())
    assert core.kept.rows == new.core.kept.rows and core.scheduler.blocks.unclaimed == new.blocks.unclaimed
    assert take(core).encode() == take(new.core).encode()
