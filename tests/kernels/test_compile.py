"""Kernels compile for chips that are not here, without spills and with the instructions that make them fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.timeout(600)  # the first test waits for the compiler
ROOT = Path(__file__).parents[2]
# Registers a thread. Of the 65536 of a multiprocessor, 168 x 128 threads fit three times and 255 x 256 threads once.
MAX_REGISTERS = {
    "paged_attention": 255,
    "combine_splits": 128,
    "qkv_rope_kv_write": 96,
    "kv_write": 64,
    "add_rms_norm": 64,
    "silu_mul": 48,
    "embedding": 32,
    "argmax_chunks": 80,
    "argmax_rows": 32,
    "philox_uniform": 48,
    "sample_rows": 255,
    "chosen_logprobs": 96,
    "penalise": 64,
    "mask_bits": 48,
    "grouped_matmul": 255,
    "narrow_grouped_matmul": 255,
    "moe_count": 32,
    "moe_order": 80,
    "moe_combine": 48,
    "move_rows": 40,
    "decode_rows": 40,
    "ragged_rows": 48,
    "quant_linear": 255,
    "sum_splits": 32,
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The quick table for Ampere, Hopper and Blackwell, compiled afresh, each in a process that does not interpret."""
    folder = tmp_path_factory.mktemp("compiled")
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}

    def compiled(capability: str) -> list[dict[str, Any]]:
        path = folder / f"{capability}.json"
        command = [sys.executable, "-m", "bench.compile_kernels", "--quick", "--capabilities", capability, "--json",
                   str(path)]
        result = subprocess.run(command, cwd=ROOT, env={**env, "TRITON_CACHE_DIR": str(folder / capability)},
                                capture_output=True, text=True, timeout=560)
        print(result.stdout)
        assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
        table: list[dict[str, Any]] = json.loads(path.read_text())
        return table

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [row for table in pool.map(compiled, ("80", "90", "100")) for row in table]


def test_nothing_spills_and_everything_fits(rows: list[dict[str, Any]]) -> None:
    assert {row["capability"] for row in rows} == {80, 90, 100}
    assert all(not row["problems"] and row["stack"] == 0 for row in rows)


def test_registers_stay_within_their_bounds(rows: list[dict[str, Any]]) -> None:
    assert {row["kernel"] for row in rows} == set(MAX_REGISTERS)
    over = [
        (row["case"], row["kernel"], row["capability"], row["registers"])
        for row in rows
        if row["registers"] > MAX_REGISTERS[row["kernel"]]
    ]
    assert over == []


def test_chunks_use_the_chips_own_matrix_instructions(rows: list[dict[str, Any]]) -> None:
    """mma on Ampere, warpgroup mma on Hopper, tensor-memory mma on Blackwell; keys arrive by asynchronous copies."""
    kinds = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
    chunks = [row for row in rows if row["kernel"] == "paged_attention" and row["case"].startswith("chunk")]
    assert len(chunks) == 8  # fp8 from 8.9 on
    for row in chunks:
        assert row.get(kinds[row["capability"]]), row
        assert row.get("LDGSTS"), row


def test_keys_are_on_their_way_while_others_are_computed(rows: list[dict[str, Any]]) -> None:
    """The block table was read with the keys it leads to. Triton then spends its stages on the table, and every tile
    waited for its own keys with nothing behind it."""
    attention = [row for row in rows if row["kernel"] == "paged_attention"]
    assert len(attention) == 13
    assert all(row["ahead"] >= 2 for row in attention), [(row["case"], row["ahead"]) for row in attention]


def test_decodes_use_matrix_instructions_and_asynchronous_copies(rows: list[dict[str, Any]]) -> None:
    """A tile of 16 rows is below a warpgroup's 64, so it is plain mma everywhere."""
    decodes = [row for row in rows if row["kernel"] == "paged_attention" and row["case"].startswith("decode")]
    assert len(decodes) == 5  # fp8 from 8.9 on
    assert all(row.get("HMMA") and row.get("LDGSTS") for row in decodes)
