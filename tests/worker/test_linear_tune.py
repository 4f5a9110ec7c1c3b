"""`launch.py tune`: what it measures is what a step then runs, and its accuracy is stated."""
from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from worker.jit import matmul as mm  # noqa: E402
from worker.jit import program as pg  # noqa: E402
from worker.linear import table, tune  # noqa: E402
from worker.linear.formats import INT8, INT8_WIDE, KIND_NAMES  # noqa: E402
from worker.linear.kernel import KernelLinear  # noqa: E402
from worker.linear.pack import pack_float32, quantize_int8  # noqa: E402
from worker.linear.route import PackedLinear  # noqa: E402


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A table file of this test's own."""
    monkeypatch.setattr(table, "table_path", lambda: tmp_path / "routes.json")
    table.load.cache_clear()
    yield tmp_path / "routes.json"
    table.load.cache_clear()


def test_a_run_keeps_a_table_that_the_next_step_uses(kept, capsys, monkeypatch):
    monkeypatch.setattr(tune, "choose", lambda times, default: min(times))      # the smallest, whatever the times
    assert tune.main(["--width", "64", "--outputs", "64", "--threads", "1", "--quick"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    for kind in range(len(KIND_NAMES)):
        smallest = table.variants(kind)[0]
        assert table.load()[kind] == (smallest,) * table.NUM_CLASSES
        assert printed["rows_per_tile"][KIND_NAMES[kind]] == [smallest] * table.NUM_CLASSES
        layer = PackedLinear([tune.make_weight(kind, 32, 64)])
        assert layer.weights[0].kind == kind
        kernel = KernelLinear(layer)
        kernel.prepare(1)
        rows = kernel.table[kernel.table[:, pg.CODE] == pg.MATMUL][0]
        assert {(int(rows[mm.TILE_ROWS]) >> (8 * i)) & 255 for i in range(table.NUM_CLASSES)} == {smallest}


def test_a_width_that_wide_blocks_do_not_fit_says_nothing_of_them(kept, capsys):
    assert tune.main(["--width", "96", "--outputs", "32", "--threads", "1", "--quick"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(KIND_NAMES) - set(printed["rows_per_tile"]) == {"int8_wide"} == set(KIND_NAMES) - set(printed["ms"])
    assert table.load()[INT8_WIDE] == table.default_rows(INT8_WIDE)


def test_a_table_of_another_machine_or_version_is_not_used(kept):
    table.save({INT8: (3, 3, 3, 3)}, {})
    assert table.load()[INT8] == (3, 3, 3, 3)
    found = json.loads(kept.read_text())
    kept.write_text(json.dumps({**found, "machine": "another"}))
    table.load.cache_clear()
    assert table.load()[INT8] == table.default_rows(INT8)


def test_the_stated_error_is_that_of_the_products(kept):
    """float32 sums in another order only; int8 rounds activations to 1/254 of their block's largest."""
    weight = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    for packed, low, high in ((pack_float32(weight), 0.0, 1e-6), (quantize_int8(weight), 1e-3, 1e-2)):
        assert low <= tune.relative_error(packed, PackedLinear([packed])(x), x) <= high
    exact = torch.from_numpy(weight).T
    assert tune.relative_error(pack_float32(weight), 1.5 * (x @ exact), x) == pytest.approx(0.5, rel=1e-4)
