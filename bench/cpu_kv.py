"""`bench cpu --kv`: what the dtype of the KV pool costs and gives, on one compiled route.

For each dtype: bytes of a token's keys and values, milliseconds of a decode step at a long context and of its
attention, and the divergence from a reference over a float32 pool: from the weights in float32 where they are loaded,
because two roundings of one integer route differ as much from each other as from what they stand for. Knows models by
their interface only.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from worker.kv_pool import kv_bytes_per_block
from worker.linear.accuracy import compare

BLOCK_SIZE = 16
CONTEXT = 8190                                  # of models that have as much
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def measure_kv(model: Any, backend: Any, make_bench: Callable[[torch.dtype, int], Any],
               best_s: Callable[[Callable[[], object], int], float], tokens: Sequence[int], repeats: int,
               reference: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """make_bench(dtype, context): a Bench of one row; tokens: the text; best_s(run, repeats): seconds of a run;
    reference: (model, backend)."""
    context = min(CONTEXT, model.config.max_position_embeddings - 2)
    result: dict[str, dict[str, Any]] = {}
    for name, dtype in DTYPES.items():
        bench = make_bench(dtype, context + 2)
        seconds = best_s(bench.step(1, context), repeats)
        entry = {"bytes_per_token": kv_bytes_per_block(backend, model.kv_spec(), BLOCK_SIZE, dtype) // BLOCK_SIZE,
                 "context": context, "ms": round(1e3 * seconds, 2), "tok_s": round(1 / seconds, 1),
                 "attention_ms": bench.stages(1, context, 1, repeats)["attention"]}
        del bench
        if dtype != torch.float32 or reference[0] is not model:
            accuracy = compare(reference, (model, backend), tokens, pool=dtype)
            entry.update(mean_kl=accuracy.mean_kl, perplexity_ratio=accuracy.perplexity_ratio,
                         same_first_choice=accuracy.agreement)
        result[name] = entry
    return result


def print_kv(route: str, result: dict[str, dict[str, Any]], reference: str) -> None:
    for name, entry in result.items():
        shown = f"{entry['bytes_per_token']} bytes a token, decode at {entry['context']}: {entry['ms']} ms, of it " \
                f"attention {entry['attention_ms']}"
        if "mean_kl" in entry:
            shown += f"; against {reference} over float32: mean KL {entry['mean_kl']:.5f}, " \
                     f"perplexity x {entry['perplexity_ratio']:.4f}"
        print(f"  {route:14} KV {name:9} {shown}", flush=True)
