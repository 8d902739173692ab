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
MODULES = (
    "rows",
    "cells",
    "tasks",
    "statistics_of",
    "train",
    "tables",
    "pictures",
    "report",
    "run",
)


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


def means_of(validation):
    """Means over seeds; what is not finite is recorded as None, and comes last."""
    return np.nan_to_num(np.array(validation, float).mean(1), nan=np.inf)


def test_each_row_was_tuned_by_its_grid_with_seeds_of_its_own(study):
    runs = {}
    for cell, row in study.rows.by_cell().items():
        grid, tuning = study.cells.grid_of(cell), row["tuning"]
        for name, values in grid.settings.items():
            np.testing.assert_allclose(tuning["settings"][name], values, rtol=1e-5)
        assert np.shape(tuning["validation"]) == (len(grid.settings["rate"]), grid.seeds)
        assert tuning["first_seed"] >= 1000 > len(row["test"])
        settings, validation = tuning["settings"], tuning["validation"]
        count = np.size(validation)
        if grid.more_seeds:
            first = means_of(validation)
            finalists = tuning["finalists"]
            settings, validation = finalists, finalists["validation"]
            assert np.shape(validation) == (grid.finalists, grid.seeds + grid.more_seeds)
            kept = np.array(validation, float)[:, : grid.seeds].mean(1)
            np.testing.assert_allclose(np.sort(kept), np.sort(first)[: grid.finalists], rtol=1e-5)
            count += grid.finalists * grid.more_seeds
        best = means_of(validation).argmin()
        assert row["best"] == pytest.approx({k: settings[k][best] for k in grid.settings})
        runs.setdefault(cell.part, set()).add(count)
    # The same budget for all.
    assert runs == {"classifier": {192}, "language": {18}}


def test_the_pages_show_what_the_results_give(study, tmp_path):
    for name, tables in study.tables.blocks(study.tables.Study()).items():
        page = (ROOT / name).read_text("utf-8")
        assert study.report.with_blocks(page, tables, name) == page
    for picture in study.pictures.draw(study.tables.Study(), tmp_path):
        assert picture.stat().st_size > 20_000
        assert (ROOT / "docs" / picture.name).exists()


def test_a_page_without_a_marker_is_refused(study):
    with pytest.raises(SystemExit, match=r"must have <!-- study:sgd --> .* once, found 0"):
        study.report.with_blocks("", {"sgd": "| a |"})


def test_intervals(study):
    mean, half = study.statistics_of.interval([1.0, 2.0, 3.0])
    # Student's t for 2 degrees of freedom is 4.303, the deviation 1.
    assert (mean, half) == pytest.approx((2.0, 4.3027 / 3**0.5), rel=1e-4)


def test_the_share_of_a_gap(study):
    worse, reference = np.array([3.0, 3.2, 2.8]), np.array([1.0, 1.2, 0.8])
    closed = study.statistics_of.gap_closed
    # Paired: seeds that are harder for all do not widen the interval.
    assert closed(worse, worse - 0.5, reference) == pytest.approx((0.25, 0.25, 0.25))
    share, low, high = closed(worse, [2.5, 2.4, 2.6], reference)
    assert low < share < high
    assert share == pytest.approx(0.25)


def small(study, algorithm, period):
    return study.rows.Cell("classifier", "sgd", 2, algorithm, period, 40)


@pytest.fixture
def small_grid(study, monkeypatch):
    def grid(cell):
        one = {"momentum": np.float32([0.5, 0.5]), "outer_rate": np.float32([1.0, 1.0])}
        return study.cells.Grid({"rate": np.float32([0.1, 1e-4]), **one}, seeds=2)

    monkeypatch.setattr(study.train, "grid_of", grid)
    task = study.tasks.classifier()
    monkeypatch.setitem(study.tasks.TASKS, "classifier", lambda: replace(task, final_seeds=2))


@pytest.mark.parametrize(("algorithm", "period"), [("all_reduce", 1), ("slowmo", 12)])
def test_a_row_is_tuned_and_trained_and_is_the_same_the_second_time(
    study, small_grid, algorithm, period
):
    cell = small(study, algorithm, period)
    row = study.train.row_of(cell)
    assert row["best"]["rate"] == pytest.approx(0.1)
    assert np.shape(row["test"]) == (2,)
    assert np.shape(row["curve"]) == (study.train.SEGMENTS,)
    assert row["curve"][-1] == pytest.approx(np.mean(row["test"]), rel=1e-4)
    assert row["curve"][-1] < row["curve"][0]
    again = study.train.final_of(cell, row["best"])
    assert again["test"] == row["test"]
    json.dumps(row)


def test_all_algorithms_are_tuned_over_their_own_settings(study):
    for cell in study.cells.all_cells():
        setting = {"rate": 0.1, "momentum": 0.5, "outer_rate": 1.0}
        study.cells.make_of(cell)(setting)
        varied = {k for k, v in study.cells.grid_of(cell).settings.items() if len(set(v)) > 1}
        is_alone = cell.algorithm in ("all_reduce", "sgp", "local_sgd")
        expected = {"rate"} if is_alone else {"rate", "momentum", "outer_rate"}
        if cell.part == "language" and cell.algorithm == "slowmo":
            expected = {"rate", "momentum"}
        assert varied == expected


def test_examples_of_a_seed_are_divided_once(study):
    """No image of validation or test is trained on, in any of its forms."""
    task = study.tasks.classifier()
    trained = np.unique(task.batches(3, 50, 8) % study.tasks.IMAGES)
    held_out = task.held_out(3)
    for part in ("validation", "test"):
        assert not np.isin(held_out[part] % study.tasks.IMAGES, trained).any()
    assert not np.isin(held_out["test"] % 1797, held_out["validation"] % 1797).any()
    assert len(trained) == study.tasks.TRAIN


def test_mixed_windows_are_the_same_ones_on_other_replicas(study):
    own, mixed = study.tasks.language(), study.tasks.mixed_language()
    shape = (6, 8, study.tasks.WINDOWS, study.tasks.MODEL.context_length + 1)
    before, after = own.batches(3, 6, 8), mixed.batches(3, 6, 8)
    assert before.shape == after.shape == shape
    moved = 0
    for update, dealt in zip(before, after, strict=True):
        windows, again = (list(map(bytes, x.reshape(-1, shape[-1]))) for x in (update, dealt))
        assert sorted(windows) == sorted(again)
        moved += sum(a != b for a, b in zip(windows, again, strict=True))
    # One window in 32 stays where it was by chance.
    assert moved > 0.85 * 6 * 32
