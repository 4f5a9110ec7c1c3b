"""Narrow linears, experts and the sampler on the GPU at hand: right, and how close to what the chip can do.

Part of `python -m bench.gpu_kernels`. A product of few rows is bound by reading its weights: its share is of the copy's
bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.gpu_bench import Bench, capability_of_device
from worker.kernels.logprobs import chosen_logprobs, chosen_logprobs_reference
from worker.kernels.moe import experts, experts_reference
from worker.kernels.quant_linear import quant_linear
from worker.kernels.sample_rows import sample_rows, sample_rows_reference
from worker.kv_quant import FP8_CAPABILITY
from worker.quant.weights import KINDS, QuantWeight, dequantize, quantize, quantize_experts


def kinds(bench: Bench) -> list[str]:
    """Those that the device computes with."""
    has_fp8 = bench.dry or capability_of_device() >= FP8_CAPABILITY
    return [kind for kind in KINDS if has_fp8 or not kind.startswith("fp8")]


def check_products(bench: Bench) -> None:
    """Every kind against float32, at the sizes where tiles change."""
    num_out, num_k = (40, 128) if bench.dry else (1096, 2048)
    for kind in kinds(bench):
        if bench.wants(f"linear {kind}"):
            weight = quantize(bench.randn(num_out, num_k), kind)
            for rows in (1, 20) if bench.dry else (1, 17, 70, 300):
                x, bias = bench.randn(rows, num_k), bench.randn(num_out)
                expected = torch.nn.functional.linear(x.float(), dequantize(weight), bias.float())
                bench.check(f"linear {kind}, {rows} rows", quant_linear(x, weight, bias), expected, 1e-2)
    num_experts, top_k, width, size = (4, 2, 128, 64) if bench.dry else (64, 8, 1024, 384)
    for kind in ("bfloat16", *kinds(bench)):
        if bench.wants(f"experts {kind}"):
            gate_up, down = 0.1 * bench.randn(num_experts, 2 * size, width), 0.1 * bench.randn(num_experts, width, size)
            narrow = [w if kind == "bfloat16" else quantize_experts(w, kind) for w in (gate_up, down)]
            wide = [dequantized(w) for w in narrow]
            for rows in (3,) if bench.dry else (1, 64, 500, 3000):
                x, (ids, weights) = bench.randn(rows, width), route(bench, rows, num_experts, top_k)
                bench.check(f"experts {kind}, {rows} rows", experts(x, ids, weights, *narrow),
                            experts_reference(x.float(), ids, weights, *wide), 2e-2)


def dequantized(weights: Tensor | QuantWeight) -> Tensor:
    """float32 [X, out, K]."""
    if isinstance(weights, Tensor):
        return weights.float()
    return torch.stack([dequantize(weights.part(expert)) for expert in range(len(weights.codes))])


def route(bench: Bench, rows: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """(ids, weights) as a router gives them."""
    scores = torch.softmax(bench.randn(rows, num_experts, dtype=torch.float32), -1)
    weights, ids = torch.topk(scores, top_k)
    return ids, weights


def check_sampler(bench: Bench) -> None:
    """Draws at given noise, and log-probabilities."""
    if not bench.wants("sampler"):
        return
    rows, vocab = (3, 300) if bench.dry else (48, 20_000)
    logits = 3 * bench.randn(rows, vocab, dtype=torch.float32)

    def column(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([values[i % len(values)] for i in range(rows)], device=bench.device).to(dtype)
    seeds = torch.randint(0, 1 << 62, (rows,), generator=bench.generator, device=bench.device)
    columns = (column(0.0, 0.7, 1.3), column(0, 0, 50, 3, dtype=torch.int32), column(1.0, 0.9), column(0.0, 0.0, 0.05),
               seeds, column(0, 1, dtype=torch.int32), column(*range(7), dtype=torch.int64))
    ours = sample_rows(logits, *columns)
    expected, margins = sample_rows_reference(logits.cpu(), *(c.cpu() for c in columns))
    is_other = (ours.cpu() != expected) & (margins > 1e-5)          # else a rounding decides
    bench.check("sampler: draws", is_other, torch.zeros(rows), 0.0)
    values, ranks, totals = chosen_logprobs(logits, expected.long().to(bench.device))
    wanted, places, log_sums = chosen_logprobs_reference(logits, expected.long().to(bench.device))
    bench.check("sampler: log-probabilities", values, wanted, 1e-5)
    bench.check("sampler: logarithms of sums", totals, log_sums, 1e-5)
    bench.check("sampler: ranks", ranks, places, 0.0)


def measure_products(bench: Bench) -> None:
    """The widest projection of Qwen3-8B, and a layer's experts of Qwen3-30B-A3B."""
    num_out, num_k = (64, 128) if bench.dry else (24576, 4096)
    for kind in kinds(bench):
        for rows in (2,) if bench.dry else (1, 64, 1024):
            if bench.wants(name := f"linear {kind}, {rows} rows x {num_k} to {num_out}"):
                weight, x = quantize(bench.randn(num_out, num_k), kind), bench.randn(rows, num_k)
                _report(bench, name, partial(quant_linear, x, weight), weight.codes.nbytes, rows * num_out * num_k)
    num_experts, width, size = (4, 128, 64) if bench.dry else (128, 2048, 768)
    for kind in ("bfloat16", *kinds(bench)):
        if not bench.wants(name := f"experts {kind}"):
            continue
        gate_up, down = (bench.randn(*shape) for shape in ((num_experts, 2 * size, width), (num_experts, width, size)))
        made = [w if kind == "bfloat16" else quantize_experts(w, kind) for w in (gate_up, down)]
        for rows in (2,) if bench.dry else (64, 4096):
            x, (ids, weights) = bench.randn(rows, width), route(bench, rows, num_experts, min(8, num_experts))
            nbytes = sum(w.nbytes if isinstance(w, Tensor) else w.codes.nbytes for w in made)
            _report(bench, f"{name}, {rows} rows", partial(experts, x, ids, weights, *made),
                    nbytes * ids.unique().numel() // num_experts, 3 * ids.numel() * width * size)


def _report(bench: Bench, name: str, call: Callable[[], object], nbytes: int, products: int) -> None:
    """Against the bandwidth where that takes longer than the products, else against their rate."""
    is_bound_by_bytes = nbytes / bench.copy_rate > 2 * products / bench.matmul_rate
    with bench.attempt(name):
        bench.report(name, bench.seconds([call]), bytes_moved=nbytes if is_bound_by_bytes else 0.0,
                     operations=2.0 * products)
