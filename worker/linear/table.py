"""Which variant of a tile kernel computes a step of so many rows: measured once per machine, kept on disk.

The variants of one format (rows per tile) give the same bits, so the table can only make a step faster or slower, never
different: a missing, foreign or stale table means the default. Written by worker/linear/tune.py.
"""
from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.jit import features
from worker.linear.formats import INT8, KIND_NAMES

ROW_CLASSES = (8, 32, 128)                      # a step is in the first class that holds its rows, else in the last
NUM_CLASSES = len(ROW_CLASSES) + 1
INT_VARIANTS, FLOAT_VARIANTS = (3, 4, 6), (4, 8, 12)
MAX_FILE_BYTES = 1 << 16


def variants(kind: int) -> tuple[int, ...]:
    """Rows per tile that the kernels of this format come in, besides smaller ones for what is left."""
    return INT_VARIANTS if kind >= INT8 else FLOAT_VARIANTS


def default_rows(kind: int) -> tuple[int, ...]:
    """Without a table: the most rows, which is the most arithmetic per weight read."""
    return (variants(kind)[-1],) * NUM_CLASSES


def machine_key() -> str:
    """What a table is valid for: processor and version of the kernels."""
    return f"{features.describe()}; {features.cache_folder().name}"


def table_path() -> Path:
    return Path(features.CACHE_ROOT).expanduser() / "routes.json"


def save(rows: Mapping[int, tuple[int, ...]], figures: Mapping[str, Any]) -> Path:
    """Replace the table of this machine. Returns where it lies."""
    path = table_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine_key(), "rows": {KIND_NAMES[kind]: list(row) for kind, row in rows.items()},
                       "figures": figures}, indent=1)
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
    load.cache_clear()
    return path


@functools.cache
def load() -> dict[int, tuple[int, ...]]:
    """Rows per tile by format, then by class of rows."""
    table = {kind: default_rows(kind) for kind in range(len(KIND_NAMES))}
    try:
        path = table_path()
        if path.stat().st_size > MAX_FILE_BYTES:
            return table
        found = json.loads(path.read_text())
        if found["machine"] == machine_key():
            for kind, name in enumerate(KIND_NAMES):
                row = tuple(found["rows"].get(name, ()))
                if len(row) == NUM_CLASSES and all(type(rows) is int and rows in variants(kind) for rows in row):
                    table[kind] = row
    except (OSError, ValueError, KeyError, TypeError, AttributeError):   # absent, or not ours
        pass
    return table


def packed_rows(kind: int) -> int:
    """A format's row of the table as one integer, eight bits a class: a field of the operation."""
    return sum(rows << (8 * index) for index, rows in enumerate(load()[kind]))
