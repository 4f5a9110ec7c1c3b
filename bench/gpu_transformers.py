"""The same requests through transformers' continuous batching, random weights of the same shape: what to compare with.

    python -m bench.gpu_transformers [--json FILE] [--against engine.json] [--seconds 50] [--dry]

A small batch comes first: it warms up and shows the speed; if 256 outputs a request would take longer than --seconds,
there are fewer. Prints tokens a second, and how many times as many this engine made in bench.gpu_engine's JSON.
`--dry`: tiny shape, CPU. The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ipc.aliases import ALIASES

FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings")
TARGET = 3.0


def run(is_dry: bool, limit_s: float) -> dict[str, Any]:
    """Tokens per second and what was run."""
    import transformers
    raw = {name: ALIASES["qwen3-8b"].hf_config[name] for name in FIELDS}
    if is_dry:
        raw |= dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, head_dim=16)
    config = transformers.Qwen3Config(**raw, eos_token_id=None, pad_token_id=0)
    config._attn_implementation = "sdpa"
    device = "cpu" if is_dry else "cuda"
    with torch.device(device):
        torch.set_default_dtype(torch.float32 if is_dry else torch.bfloat16)
        model = transformers.Qwen3ForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    count, prompt, outputs = (3, 20, 4) if is_dry else (256, 512, 256)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, raw["vocab_size"], prompt).tolist() for _ in range(count)]

    def generate(some: list[list[int]], num_tokens: int) -> tuple[int, float]:
        """(tokens made, seconds)."""
        options = transformers.GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1,
                                                pad_token_id=0)
        begin = time.perf_counter()
        found = model.generate_batch(some, generation_config=options)
        return sum(len(output.generated_tokens) for output in found.values()), time.perf_counter() - begin

    few = prompts[:16]
    generate(few, 4)
    made, seconds = generate(few, min(32, outputs))
    whole_s = seconds / made * count * outputs / 4      # a batch of all is some times as fast; 4 is on the safe side
    while whole_s > limit_s and outputs > 32:
        outputs, whole_s = outputs // 2, whole_s / 2
    made, seconds = generate(prompts, outputs)
    return {"benchmark": "gpu_transformers", "transformers": transformers.__version__, "requests": count,
            "outputs": outputs, "tokens": made, "seconds": seconds, "tokens_per_s": made / seconds}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path, help="JSON of bench.gpu_engine")
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    result = run(args.dry, args.seconds)
    print(f"transformers {result['transformers']}: {result['requests']} requests of {result['outputs']} tokens in "
          f"{result['seconds']:.1f} s, {result['tokens_per_s']:.0f} tok/s")
    if args.against and args.against.exists():
        rows = json.loads(args.against.read_text())["rows"]
        ours = next((row["tokens_per_s"] for row in rows if "tokens_per_s" in row), None)
        if ours is not None:
            result["ours_over_theirs"] = ours / result["tokens_per_s"]
            mark = "" if args.dry or result["ours_over_theirs"] >= TARGET else " !"
            print(f"ours {ours:.0f} tok/s: {result['ours_over_theirs']:.2f} times as many, target {TARGET:.0f}{mark}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
