"""`benchmarks/study`: its statistics, its tables and pictures from the results, and a small run."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
MODULES = "rows cells tasks statistics_of train tables pictures report run".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def study():
    """The modules of the study, which are scripts and import each other by name."""
    folders = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "study")]
    sys.path[:0] = folders
    # In a process that has run tests of tests/train, `train` is the name of that folder.
    others = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(others)
        sys.path[:] = [path for path in sys.path if path not in folders]


def test_the_results_hold_every_cell_once_and_no_other(study):
    recorded = [
        study.rows.cell_of(row) for part in study.rows.PARTS for row in study.rows.recorded(part)
    ]
    assert sorted(recorded) == sorted(study.cells.all_cells())


def test_the_page_shows_what_the_results_give(study, tmp_path):
    pages = [page.read_text("utf-8") for page in study.report.PAGES]
    assert study.report.with_tables(pages, study.tables.all_tables(study.tables.Study())) == pages
    for picture in study.pictures.draw(study.tables.Study(), tmp_path):
        assert picture.stat().st_size > 20_000
        assert (ROOT / "docs" / picture.name).exists()


def test_intervals_and_the_share_of_a_gap(study):
    mean, half = study.statistics_of.interval([1.0, 2.0, 3.0])
    # Student's t for 2 degrees of freedom is 4.303, the deviation 1.
    assert (mean, half) == pytest.approx((2.0, 4.3027 / 3**0.5), rel=1e-4)
    worse, reference = np.array([3.0, 3.2, 2.8]), np.array([1.0, 1.2, 0.8])
    closed = study.statistics_of.gap_closed
    # Paired: seeds that are harder for all do not widen the interval.
    assert closed(worse, worse - 0.5, reference) == pytest.approx((0.25, 0.25, 0.25))
    share, low, high = closed(worse, [2.5, 2.4, 2.6], reference)
    assert low < share < high
    assert share == pytest.approx(0.25)


@pytest.fixture
def small_grid(study, monkeypatch):
    def grid(cell):
        one = {"momentum": np.float32([0.5, 0.5]), "outer_rate": np.float32([1.0, 1.0])}
        return study.cells.Grid({"rate": np.float32([0.1, 1e-4]), **one}, seeds=2)

    monkeypatch.setattr(study.train, "grid_of", grid)
    task = study.tasks.classifier()
    monkeypatch.setitem(study.tasks.TASKS, "classifier", lambda: replace(task, final_seeds=2))


def test_a_row_is_tuned_and_trained_and_is_the_same_the_second_time(study, small_grid):
    cell = study.rows.Cell("classifier", "sgd", 2, "noloco", 12, 40)
    row = study.train.row_of(cell)
    assert row["best"]["rate"] == pytest.approx(0.1)
    assert np.shape(row["test"]) == (2,)
    assert np.shape(row["curve"]) == (study.train.SEGMENTS,)
    assert row["curve"][-1] == pytest.approx(np.mean(row["test"]), rel=1e-4)
    assert row["curve"][-1] < row["curve"][0]
    again = study.train.final_of(cell, row["best"])
    assert again["test"] == row["test"]
    json.dumps(row)
