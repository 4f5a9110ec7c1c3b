"""What filling grammar masks costs per row, and how much of it a step still waits for behind its forward pass.

    python launch.py bench mask-fill [--rows 1,32,256] [--forward-ms 10] [--steps 30]

Rows follow a JSON schema over a vocabulary of 151,936 made-up tokens, each at its own place. The forward pass is a
sleep: what the device does meanwhile. Prints a line per number of rows and one JSON object last.
"""
from __future__ import annotations

import argparse
import json
import time
from typing import Any

import msgspec
import numpy as np

from ipc.sampling_params import SamplingParams
from ipc.structured_outputs import StructuredOutputs
from worker.request_state import RequestState
from worker.sampling.grammar import Grammars
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


def measure(grammars: Grammars, count: int, forward_s: float, steps: int) -> dict[str, float]:
    """Medians over steps: filling alone, and what is left of it behind a forward pass."""
    state, rows, draw = make_rows(grammars, count), np.arange(count), np.random.default_rng(1)
    pairs = [(take_step(grammars, state, rows, 0.0, draw)[0], take_step(grammars, state, rows, forward_s, draw)[1])
             for _ in range(steps)]
    if any(options.grammar.is_done for options in state.options[:count] if options is not None and options.grammar):
        raise RuntimeError("a row has ended; measure fewer steps")
    alone, waited = np.median(np.array(pairs), axis=0).tolist()
    return {"fill_us": round(1e6 * alone, 1), "fill_us_per_row": round(1e6 * alone / count, 1),
            "waited_us": round(1e6 * waited, 1)}


def main(argv: list[str] | None = None) -> int:
    """All numbers of rows."""
    parser = argparse.ArgumentParser(prog="launch.py bench mask-fill", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args(argv)
    grammars = Grammars(lambda: from_table(vocabulary(), [], [EOS]))
    sizes: dict[str, Any] = {}
    for count in map(int, args.rows.split(",")):
        found = sizes[str(count)] = measure(grammars, count, args.forward_ms / 1000, args.steps)
        print(f"{count:4} rows  filling {found['fill_us']:9.1f} us ({found['fill_us_per_row']:7.1f} a row)  waited for "
              f"behind {args.forward_ms:g} ms: {found['waited_us']:7.1f} us", flush=True)
    print(json.dumps({"benchmark": "mask fill", "vocab": VOCAB, "forward_ms": args.forward_ms, "rows": sizes}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
