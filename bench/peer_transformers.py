"""Hugging Face transformers as a library, for `bench peers`: generate() over equal batches.

Runs in an interpreter that has torch and transformers; imports nothing of this project. It has no server and no
batching of its own, so a row is one call of generate with all prompts. The last line is one JSON object.
"""
from __future__ import annotations

import time

STARTED = time.monotonic()

import argparse  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
from typing import Any  # noqa: E402

# row: (requests, prompt tokens, output tokens)
ROWS = {"c1": (1, 256, 128), "c8": (8, 256, 128), "prefill": (8, 256, 1)}


def generate(model: Any, num: int, prompt: int, output: int, seed: int) -> tuple[float, float | None]:
    """(seconds, decode tok/s after the first token) of one batch of random prompts."""
    import torch
    draw = random.Random(seed)
    ids = torch.tensor([[draw.randint(100, 3999) for _ in range(prompt)] for _ in range(num)])
    times: list[float] = []

    class Clock:
        """Sees every token, as a streamer does, whatever the batch."""

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            times.append(time.monotonic())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    begin = time.monotonic()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=output,
                       min_new_tokens=output, pad_token_id=0, stopping_criteria=[Clock()])
    seconds = time.monotonic() - begin
    return seconds, num * (output - 1) / (times[-1] - times[0]) if output > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=getattr(torch, args.dtype)).eval()
    generate(model, 1, 4, 1, 0)
    result: dict[str, Any] = {"first_token_s": time.monotonic() - STARTED, "rows": {}}
    for row in args.rows.split(","):
        if row not in ROWS:
            continue
        num, prompt, output = ROWS[row]
        runs = [generate(model, num, prompt, output, seed) for seed in range(args.repeats)]
        seconds = [took for took, _ in runs]
        rates = [rate for _, rate in runs if rate is not None]
        result["rows"][row] = {"value": [num * (prompt if row == "prefill" else output) / took for took in seconds],
                               "decode": [statistics.median(rates)] if rates else []}
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM:"):
            result["peak_mb"] = int(line.split()[1]) / 1e3
    print(json.dumps(result))


if __name__ == "__main__":
    main()
