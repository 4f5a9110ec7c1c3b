"""The baseline of `bench seed`: continuous batching over fixed slots, the design that a paged pool replaces.

    slot 0  [prompt ........ | output ..... | unused .............]   slot_tokens wide, reserved while a request lives
    slot 1  [prompt ... | output .. | unused .....................]
    ...     a finished request's slot goes to the next waiting one at once

It runs the worker's own FlatModel (same weights, matmuls and threads): only the cache, the attention over it and the
scheduling are its own. It has no prefix cache, no block table and no mixed batches: a forward call is one prefill chunk
of one request or one decode of all running requests. To be a fair opponent it decodes through torch's fused attention
on views of its static cache, prepares a step in a handful of calls, and starts every request that has a free slot
before it decodes, so that decode batches are as full as slots can make them.
"""

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.seed_workload import SEED_MODEL_CONFIG, seed_workload
from bench.stats import median, print_json
from ipc.model_config import from_hf_config
from ipc.model_source import ModelFiles
from ipc.option_help import OptionParser
from worker.jit import features
from worker.jit.team import get_team
from worker.linear.kernel import KernelLinear
from worker.linear.pack import pack_float32
from worker.linear.route import PackedLinear
from worker.models.flat_model import FlatModel
from worker.models.ops import TORCH_OPS
from worker.models.layers import Linear
from worker.models.loader import load_model

DECODE_CONTEXT = 256  # tokens at which the baseline's decode is compared with the bare model's


@dataclass
class SlotStep:
    """One forward call as its attention sees it. The rows are a chunk of one slot, or one row per running slot."""

    first_slot: int  # attention runs over slots first_slot .. last_slot
    last_slot: int
    rows: Tensor  # int64, slot of each decode row; unused by a chunk
    positions: Tensor  # int64 [N], where the rows' keys go
    num_keys: int  # longest context of the call
    begin: int | None  # first position of a prefill chunk; None: decode
    mask: Tensor | None  # additive, broadcasts over heads; None: plain causal chunk from position 0


class SlotAttention:
    """FlatModel's backend argument for caches of shape [slots, Hkv, slot_tokens, D]; meta is a SlotStep.

    Decode attends over a view of the cache, never a copy: with holes among the running slots, the queries are spread
    over all slots up to the last running one, which costs less than gathering keys and values.
    """

    ops = TORCH_OPS

    def write(self, cache: tuple[Tensor, Tensor], k: Tensor, v: Tensor, step: SlotStep) -> None:
        """k, v [N, Hkv, D]."""
        for target, rows in zip(cache, (k, v), strict=True):
            if step.begin is None:
                target[step.rows, :, step.positions] = rows
            else:
                target[step.first_slot, :, step.begin : step.num_keys] = rows.transpose(0, 1)

    def forward(
        self, q: Tensor, cache: tuple[Tensor, Tensor], step: SlotStep, *, scale: float | None = None, window: int = 0
    ) -> Tensor:
        """q [N, H, D] -> [N, H, D]. The window is in the step's mask already."""
        num_slots = step.last_slot + 1 - step.first_slot
        k, v = (pool[step.first_slot : step.last_slot + 1, :, : step.num_keys] for pool in cache)
        if step.begin is not None:
            q, is_causal = q.transpose(0, 1)[None], step.mask is None
            out = F.scaled_dot_product_attention(q, k, v, step.mask, is_causal=is_causal, scale=scale, enable_gqa=True)
            return out[0].transpose(0, 1)
        if len(q) == num_slots:
            return F.scaled_dot_product_attention(q[:, :, None], k, v, step.mask, scale=scale, enable_gqa=True)[:, :, 0]
        spread = q.new_zeros(num_slots, *q.shape[1:]).index_copy_(0, step.rows, q)
        out = F.scaled_dot_product_attention(spread[:, :, None], k, v, step.mask, scale=scale, enable_gqa=True)
        return out[:, :, 0].index_select(0, step.rows)


@dataclass
class _Running:
    """The request in one slot."""

    request_index: int
    prompt: Tensor  # int64
    max_tokens: int
    num_computed: int = 0
    tokens: list[int] = field(default_factory=list)


class SlotEngine:
    """Greedy decoding of many requests; ends each at its max_tokens only, so every engine owes the same tokens."""

    def __init__(self, model: FlatModel, num_slots: int = 8, slot_tokens: int = 320, chunk: int = 256) -> None:
        if min(num_slots, slot_tokens, chunk) < 1:
            raise ValueError(
                f"num_slots {num_slots}, slot_tokens {slot_tokens}, chunk {chunk}: each must be at least 1"
            )
        self.model, self.num_slots, self.slot_tokens, self.chunk = model, num_slots, slot_tokens, chunk
        num_layers, num_kv_heads, head_dim = model.kv_spec()
        weight = model.embed_tokens
        shape = (num_slots, num_kv_heads, slot_tokens, head_dim)
        self.caches = [
            tuple(torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
            for _ in range(num_layers)
        ]
        self.device, self.attention = weight.device, SlotAttention()
        self.all_slots = torch.arange(num_slots, device=self.device)
        self.key_positions = keys = torch.arange(slot_tokens, device=self.device)
        window = model.config.sliding_window
        self.has_window = window > 0
        # masks[p] is what a query at position p adds to its scores: made once, a step only picks rows.
        unseen = (keys > keys[:, None]) | (keys <= keys[:, None] - (window or slot_tokens))
        zeros = torch.zeros(unseen.shape, dtype=weight.dtype, device=self.device)
        self.masks = zeros.masked_fill_(unseen, float("-inf"))
        self.slots: list[_Running | None] = [None] * num_slots
        self.waiting: deque[_Running] = deque()
        self.outputs: dict[int, list[int]] = {}
        self.num_steps = self.num_forward_calls = 0

    def generate(self, requests: Sequence[tuple[Any, int]]) -> tuple[list[list[int]], dict[str, Any]]:
        """[(prompt ids, max_tokens)] -> (output tokens of each request, figures).

        Raises ValueError when a request cannot fit a slot; nothing has run then.
        """
        for index, (prompt, max_tokens) in enumerate(requests):
            need = len(prompt) + max_tokens - 1  # the last token is never an input
            if len(prompt) < 1 or max_tokens < 1 or need > self.slot_tokens:
                raise ValueError(
                    f"request {index}: prompt of {len(prompt)} and max_tokens {max_tokens} need {need} places, a slot "
                    f"has {self.slot_tokens} and both must be at least 1; shorten it or raise slot_tokens"
                )
        self.num_steps = self.num_forward_calls = 0
        self.outputs = {}
        for index, (prompt, max_tokens) in enumerate(requests):
            self.waiting.append(
                _Running(index, torch.as_tensor(prompt, dtype=torch.int64, device=self.device), max_tokens)
            )
        begin = time.monotonic()
        with torch.inference_mode():
            while self.waiting or any(self.slots):
                self.step()
        wall_s = time.monotonic() - begin
        tokens = [self.outputs[index] for index in range(len(requests))]
        num_tokens = sum(map(len, tokens))
        return tokens, {
            "steps": self.num_steps,
            "forward_calls": self.num_forward_calls,
            "output_tokens": num_tokens,
            "wall_s": round(wall_s, 4),
            "tok_s": round(num_tokens / wall_s, 1),
            "kv_slots": self.num_slots * self.slot_tokens,
        }

    def step(self) -> None:
        """Fill free slots; one prefill call per request whose prompt is not computed; one decode call for the rest."""
        self.num_steps += 1
        for index, running in enumerate(self.slots):
            if running is None and self.waiting:
                self.slots[index] = self.waiting.popleft()
        for index, running in enumerate(self.slots):
            if running is not None and running.num_computed < len(running.prompt):
                self._prefill(index, running)
        rows = [index for index, running in enumerate(self.slots) if running is not None and running.tokens]
        if rows:
            self._decode(rows)

    def _forward(self, input_ids: Tensor, step: SlotStep) -> Tensor:
        self.num_forward_calls += 1
        hidden: Tensor = self.model(input_ids, step.positions, self.caches, step, self.attention)
        return hidden

    def _prefill(self, index: int, running: _Running) -> None:
        """One chunk of one prompt; the last one gives the first output token."""
        begin = running.num_computed
        end = min(begin + self.chunk, len(running.prompt))
        positions = self.key_positions[begin:end]
        mask = self.masks[begin:end, :end] if begin or self.has_window else None
        step = SlotStep(index, index, self.all_slots[index : index + 1], positions, end, begin, mask)
        hidden = self._forward(running.prompt[begin:end], step)
        running.num_computed = end
        if end == len(running.prompt):
            self._append(index, int(self.model.compute_logits(hidden[-1:]).argmax(-1)), num_computed=0)

    def _decode(self, rows: list[int]) -> None:
        """One token for each running slot."""
        running = [self.slots[index] for index in rows]
        pairs = [(request.tokens[-1], request.num_computed) for request in running if request is not None]
        last, where = torch.tensor(pairs, device=self.device).t().contiguous()
        num_keys = max(position for _, position in pairs) + 1
        if len(rows) == rows[-1] + 1:
            selected, looking = self.all_slots[: len(rows)], where
        else:
            selected = torch.tensor(rows, device=self.device)
            looking = where.new_zeros(rows[-1] + 1).index_copy_(0, selected, where)  # an idle slot looks at its key 0
        mask = self.masks.index_select(0, looking)[:, None, None, :num_keys]
        step = SlotStep(0, rows[-1], selected, where, num_keys, None, mask)
        tokens = self.model.compute_logits(self._forward(last, step)).argmax(-1).tolist()
        for index, token in zip(rows, tokens, strict=True):
            self._append(index, token, num_computed=1)

    def _append(self, index: int, token: int, num_computed: int) -> None:
        """Keep a sampled token, count what its call computed; a request that has all its tokens leaves its slot."""
        running = self.slots[index]
        if running is None:
            raise RuntimeError(f"slot {index} sampled a token and is empty")
        running.tokens.append(token)
        running.num_computed += num_computed
        if len(running.tokens) == running.max_tokens:
            self.outputs[running.request_index] = running.tokens
            self.slots[index] = None


class PlainAttention:
    """Decode rows of equal length over a [batch, Hkv, tokens, D] cache; meta is the position. No mask, no bookkeeping:
    the fastest this model's decode can be with these modules, which is what the baseline is held against."""

    ops = TORCH_OPS

    def write(self, cache: tuple[Tensor, Tensor], k: Tensor, v: Tensor, position: int) -> None:
        cache[0][:, :, position], cache[1][:, :, position] = k, v

    def forward(
        self, q: Tensor, cache: tuple[Tensor, Tensor], position: int, *, scale: float | None = None, window: int = 0
    ) -> Tensor:
        first = max(0, position + 1 - window) if window else 0
        k, v = (pool[:, :, first : position + 1] for pool in cache)
        return F.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale, enable_gqa=True)[:, :, 0]


@torch.inference_mode()
def measure_plain_decode(model: FlatModel, batch: int, context: int, num_steps: int = 40) -> float:
    """Tokens per second of the bare model on `batch` rows whose contexts end at `context` tokens."""
    num_layers, num_kv_heads, head_dim = model.kv_spec()
    weight = model.embed_tokens
    shape = (2, batch, num_kv_heads, context, head_dim)
    caches = [torch.zeros(shape, dtype=weight.dtype, device=weight.device).unbind() for _ in range(num_layers)]
    ids = torch.arange(batch, device=weight.device) % model.config.vocab_size
    attention = PlainAttention()
    for timed in (False, True):
        begin = time.monotonic()
        for position in range(max(0, context - num_steps), context):
            hidden = model(ids, torch.full_like(ids, position), caches, position, attention)
            ids = model.compute_logits(hidden).argmax(-1)
        ids.tolist()  # waits for the device
        if timed:
            elapsed = time.monotonic() - begin
    return batch * min(num_steps, context) / elapsed


@torch.inference_mode()
def measure_slot_decode(model: FlatModel, batch: int, context: int, num_steps: int = 40) -> float:
    """The same for the engine: whole steps, bookkeeping included, once every prompt is computed."""
    engine = SlotEngine(model, num_slots=batch, slot_tokens=context + 1)
    prompt = torch.arange(context - num_steps, device=engine.device) % model.config.vocab_size
    for timed in (False, True):
        engine.waiting.extend(_Running(index, prompt, num_steps + 2) for index in range(batch))
        while engine.waiting or any(running and not running.tokens for running in engine.slots):
            engine.step()
        begin = time.monotonic()
        num_tokens = 0
        while any(engine.slots):
            num_tokens += sum(running is not None for running in engine.slots)
            engine.step()
        if timed:
            elapsed = time.monotonic() - begin
    return num_tokens / elapsed


def load_seed_model(seed: int = 0, compiled_linears: bool = False, num_threads: int = 0) -> FlatModel:
    """The test model of `bench seed` with random weights: the same for the same seed.

    compiled_linears: its linear layers are the worker's compiled float32 kernels, so that a comparison with the engine
    compares engines and not matmuls.
    """
    config = from_hf_config(SEED_MODEL_CONFIG, "bench seed model")
    model = load_model(ModelFiles("dummy", "", config, "bench-seed"), dtype="float32", device="cpu", seed=seed)
    if compiled_linears and features.missing() is None:
        torch.set_num_threads(1)  # as in the worker: one pool of threads computes, the kernels' own
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Linear):
                    setattr(module, name, CompiledLinear(child, num_threads))
    return model


class CompiledLinear(torch.nn.Module):
    """A Linear whose product is done by the worker's compiled kernel."""

    def __init__(self, linear: Linear, num_threads: int) -> None:
        super().__init__()
        self.packed = PackedLinear([pack_float32(linear.weight.detach().numpy())])
        self.kernel = KernelLinear(self.packed, get_team(num_threads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] float32 -> [M, N]."""
        return self.kernel(x.contiguous())


def main(argv: list[str] | None = None) -> int:
    """Run the workload on the baseline and say how near its decode is to the bare model's; JSON in the last line."""
    parser = OptionParser(prog="launch.py bench slot_engine", description="The fixed-slot baseline on its own.")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=5, help="runs; figures are medians")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; default: torch's choice")
    args = parser.parse_args(argv)
    if args.repeat < 1 or args.threads < 0:
        parser.error("--repeat must be at least 1, --threads at least 0")
    if args.threads:
        torch.set_num_threads(args.threads)
    model, workload = load_seed_model(args.seed), seed_workload(args.requests, args.seed)
    engine = SlotEngine(model)
    runs, plain, slots = [], [], []
    for _ in range(args.repeat):
        runs.append(engine.generate(workload)[1])
        plain.append(measure_plain_decode(model, engine.num_slots, DECODE_CONTEXT))
        slots.append(measure_slot_decode(model, engine.num_slots, DECODE_CONTEXT))
    ratio = median(slot / bare for slot, bare in zip(slots, plain, strict=True))
    figures = {name: median(run[name] for run in runs) for name in ("wall_s", "tok_s")}
    print(f"decode of {engine.num_slots} requests at {DECODE_CONTEXT} tokens: bare model {median(plain):.0f} tok/s,")
    print(f"slot engine {median(slots):.0f} tok/s, ratio {ratio:.2f} (medians of {args.repeat} runs)")
    decode = {"plain_decode_tok_s": round(median(plain), 1), "slot_decode_tok_s": round(median(slots), 1)}
    print_json({"engine": "fixed slots", **runs[0], **figures, **decode, "decode_ratio": round(ratio, 3)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
