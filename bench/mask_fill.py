"""What filling grammar masks costs per row, and how much of it a step still waits for behind its forward pass.

    python launch.py bench mask-fill [--rows 1,32,256] [--forward-ms 10,20] [--steps 30]

Rows follow a JSON schema over a vocabulary of 151,936 made-up tokens, each at its own place. The forward pass is a
sleep: what the device does meanwhile. Filling takes as many threads as there are cores, 16 at most, and what does not
fit behind a forward pass is waited for. Prints a line per number of rows and one JSON object last.
"""
from __future__ import annotations

import argparse
import json
import time
from typing import Any

import msgspec
import numpy as np

from ipc.option_help import OptionParser
from ipc.sampling_params import SamplingParams
from ipc.structured_outputs import StructuredOutputs
from worker.request_state import RequestState
from worker.sampling.grammar import Grammars, num_fill_threads
from worker.sampling.grammar_vocabulary import from_table
from worker.sampling.row_options import RowOptions

VOCAB = 151_936
EOS = VOCAB - 1
ENTRY = {"type": "object", "properties": {
    "name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
    "place": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
              "required": ["x", "y"], "additionalProperties": False},
    "kind": {"enum": ["red", "green", "blue"]}}, "required": ["name", "tags", "place", "kind"],
    "additionalProperties": False}
SCHEMA = {"type": "array", "items": ENTRY, "minItems": 100}         # longer than any measurement


def vocabulary() -> list[bytes]:
    """Bytes, then words of one to eight printable characters with or without a blank, as a BPE's are."""
    draw = np.random.default_rng(0)
    tokens = [bytes([index]) for index in range(256)]
    known = set(tokens)
    while len(tokens) < EOS:
        word = bytes(draw.integers(33, 127, int(draw.integers(1, 9))).astype(np.uint8))
        word = b" " + word if draw.random() < 0.4 else word
        if word not in known:
            known.add(word)
            tokens.append(word)
    return [*tokens, b""]


def make_rows(grammars: Grammars, count: int) -> RequestState:
    """Rows with the grammar, each some tokens ahead of the one before."""
    state = RequestState(count, 4096, 16)
    spec = StructuredOutputs(json=json.dumps(SCHEMA))
    state.n = count
    state.num_prompt[:count] = state.known[:count] = 1
    for row in range(count):
        options = RowOptions(SamplingParams(max_tokens=4000, structured_outputs=spec), state.penalties)
        options.grammar_key = msgspec.msgpack.encode(spec)
        state.options[row] = options
    rows = np.arange(count)
    for step in range(min(8, count)):           # spread the rows over the schema
        take_step(grammars, state, rows[rows % 8 >= step], 0.0, np.random.default_rng(step))
    return state


def take_step(grammars: Grammars, state: RequestState, rows: np.ndarray, forward_s: float,
              draw: np.random.Generator) -> tuple[float, float]:
    """(seconds from begin to masks without the forward pass, seconds waited behind it); rows take an allowed token."""
    began = time.perf_counter()
    step = grammars.begin(state, rows)
    if step is None:
        raise RuntimeError("no row has a grammar")
    if forward_s:
        time.sleep(forward_s)
    waiting = time.perf_counter()
    words, index = step.mask(rows, VOCAB)
    ended = time.perf_counter()
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :EOS]
    tokens = np.full(len(rows), -1)
    for entry, at in enumerate(index.tolist()):
        if at >= 0:
            tokens[entry] = draw.choice(np.flatnonzero(allowed[at]))
    step.accept(rows, tokens)
    return ended - began, ended - waiting


def measure(grammars: Grammars, count: int, forwards_s: list[float], steps: int) -> dict[str, Any]:
    """Medians over steps, taken in turns: filling alone, and what is left of it behind each forward pass."""
    state, rows, draw = make_rows(grammars, count), np.arange(count), np.random.default_rng(1)
    alone, waited = [], []
    for _ in range(steps):
        alone.append(take_step(grammars, state, rows, 0.0, draw)[0])
        waited.append([take_step(grammars, state, rows, forward_s, draw)[1] for forward_s in forwards_s])
    if any(options.grammar.is_done for options in state.options[:count] if options is not None and options.grammar):
        raise RuntimeError("a row has ended; measure fewer steps")
    fill = float(np.median(alone))
    return {"fill_us": round(1e6 * fill, 1), "fill_us_per_row": round(1e6 * fill / count, 1),
            "waited_us": [round(1e6 * value, 1) for value in np.median(np.array(waited), axis=0).tolist()]}


def main(argv: list[str] | None = None) -> int:
    """All numbers of rows."""
    parser = OptionParser(prog="launch.py bench mask-fill", description=__doc__,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--forward-ms", default="10,20")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args(argv)
    forwards = [float(ms) for ms in args.forward_ms.split(",")]
    grammars = Grammars(lambda: from_table(vocabulary(), [], [EOS]))
    sizes: dict[str, Any] = {}
    for count in map(int, args.rows.split(",")):
        found = sizes[str(count)] = measure(grammars, count, [ms / 1000 for ms in forwards], args.steps)
        waited = ", ".join(f"behind {ms:g} ms {us:7.1f} us" for ms, us in zip(forwards, found["waited_us"]))
        print(f"{count:4} rows  filling {found['fill_us']:9.1f} us ({found['fill_us_per_row']:7.1f} a row)  waited for "
              f"{waited}", flush=True)
    print(json.dumps({"benchmark": "mask fill", "vocab": VOCAB, "threads": num_fill_threads(), "forward_ms": forwards,
                      "rows": sizes}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
