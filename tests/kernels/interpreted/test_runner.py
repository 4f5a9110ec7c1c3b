"""Core and worker in one process with the Triton backend: batches made on the device, fused ops, results read a step
late, decode steps padded and replayed. The tokens are those of the reference backend."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.equivalence.test_milestone import PROMPTS, OverlappingEngine, alone
from worker.attention.triton_paged import TritonBackend
from worker.device_rows import ResidentBuilder

REQUESTS = (1, 4)  # the interpreter is slow
MAX_TOKENS = 6


class Recorded:
    """A capture without a device: the call itself, made again at the same addresses. Kernels read lengths, slots and
    tables from there, so it computes what a graph would."""

    num_replays = 0

    def __init__(self, run: Callable[[], None], pool: object) -> None:
        self.run = run

    def replay(self) -> None:
        Recorded.num_replays += 1
        self.run()


def run(graphs: str, **options: object) -> dict[int, list[int]]:
    engine = OverlappingEngine("triton", async_scheduling=True, graphs=graphs, is_resident=True, **options)
    if graphs == "auto" and engine.worker.graphs is not None:
        engine.worker.graphs._capture = Recorded
        while engine.worker.has_capture:
            engine.worker.capture_next()
    for request_id in REQUESTS:
        engine.add(request_id, PROMPTS[request_id], max_tokens=MAX_TOKENS)
    engine.run()
    engine.assert_idle()
    assert isinstance(engine.worker.builder, ResidentBuilder)
    return dict(engine.tokens)


@pytest.mark.parametrize("graphs, chunk", [("static", 64), ("auto", 5)])
def test_tokens_equal_the_reference_backends(graphs: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[str] = set()
    for method in ("embed", "add_norm", "silu_mul", "rotate_and_write", "arg_max"):
        original = getattr(TritonBackend.ops, method)

        def noting(*args: object, method: str = method, original: Callable[..., object] = original) -> object:
            launched.add(method)
            return original(*args)
        monkeypatch.setattr(TritonBackend.ops, method, noting)
    before = Recorded.num_replays
    expected = alone("reference")
    tokens = run(graphs, num_blocks=8, block_size=16,
                 max_num_batched_tokens=chunk, max_num_seqs=3)
    assert tokens == {request_id: expected[request_id][:MAX_TOKENS] for request_id in REQUESTS}
    assert (Recorded.num_replays > before) == (graphs == "auto")
    assert launched == {"embed", "add_norm", "silu_mul", "rotate_and_write", "arg_max"}
