"""A worker that begins with torch and changes to the compiled model while requests run."""
from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from tests.equivalence.test_milestone import CONFIGURATIONS, MAX_TOKENS, PROMPTS  # noqa: E402
from tests.equivalence.test_quantized_kv import QuantizedEngine, alone, flat_model, model_of  # noqa: E402
from worker.attention.jit import JitBackend  # noqa: E402
from worker.attention.jit_layout import LayoutBackend  # noqa: E402
from worker.attention.reference import ReferenceBackend  # noqa: E402


class UpgradedEngine(QuantizedEngine):
    """Serves by torch over the kernels' pools; by the kernels from the given step on."""

    def __init__(self, pool: str, step: int, **options: Any) -> None:
        super().__init__("jit", pool, **options)
        self.worker.use(flat_model(), LayoutBackend())
        self.step, self.num_torch_steps, self.num_open_rows = step, 0, 0
        execute = self.worker.execute

        def upgraded(*args: Any) -> Any:
            if self.worker.backend.name == "torch" and self.num_torch_steps == self.step:
                self.num_open_rows = self.worker.state.n
                self.worker.use(model_of("jit"), JitBackend())
            self.num_torch_steps += self.worker.backend.name == "torch"
            return execute(*args)
        self.worker.execute = upgraded  # type: ignore[method-assign]


@pytest.mark.parametrize("pool", ["float32", "int8"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_rows_in_flight_go_on_with_what_torch_wrote(name: str, is_async: bool, pool: str) -> None:
    """Prompts half computed, blocks copied, swapped and cached by one, read by the other: the same greedy tokens."""
    engine = UpgradedEngine(pool, 6, async_scheduling=is_async, **CONFIGURATIONS[name])
    for request_id, prompt in PROMPTS.items():
        engine.add(request_id, prompt, max_tokens=MAX_TOKENS[request_id])
    engine.run()
    assert engine.worker.backend.name == "jit" and engine.num_torch_steps == 6 and engine.num_open_rows >= 2
    assert engine.tokens == alone("jit", pool)
    engine.assert_idle()


def test_torch_alone_over_the_kernels_pools_gives_the_same_tokens() -> None:
    engine = UpgradedEngine("fp8", -1, num_blocks=64)
    for request_id, prompt in PROMPTS.items():
        engine.add(request_id, prompt, max_tokens=MAX_TOKENS[request_id])
    engine.run()
    assert engine.worker.backend.name == "torch" and engine.tokens == alone("reference", "fp8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("size, dim", [(16, 16), (5, 6)])
def test_both_backends_write_the_same_bytes(dtype: torch.dtype, size: int, dim: int) -> None:
    """Where a token lies; padding rows go to the last slot in both."""
    from tests.worker.test_jit_attention import make_meta
    table = torch.tensor([[3, 1, 2, 4]], dtype=torch.int32)
    meta = make_meta([18, 1], [18, 0], torch.cat([table, table]), size)
    k, v = torch.randn((2, 19, 2, dim), generator=torch.Generator().manual_seed(0)).unbind(0)
    caches = []
    for backend in (LayoutBackend(), JitBackend()):
        cache = backend.allocate((6, size, 2, dim), dtype, "cpu")
        backend.write(cache, k, v, meta)
        caches.append(cache)
    assert len(caches[0]) == (4 if dtype.itemsize == 1 else 2)
    for ours, theirs in zip(*caches):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) and ours.view(torch.uint8).any()
    plain = ReferenceBackend().allocate((6, size, 2, dim), dtype, "cpu")
    ReferenceBackend().write(plain, k, v, meta)
    q = torch.randn((19, 4, dim), generator=torch.Generator().manual_seed(1))
    assert torch.equal(LayoutBackend().forward(q, caches[1], meta), ReferenceBackend().forward(q, plain, meta))
