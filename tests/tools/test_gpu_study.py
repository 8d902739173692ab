"""The study by size: its text, its plan, a tiny run that is interrupted, and its report."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    import gpu_study
    import gpu_study_report as report
finally:
    sys.path.remove(str(ROOT / "benchmarks"))

from support.promotion import standard  # noqa: E402

OTHER = "diloco"
TURNS = 3
TINY = (gpu_study.Experiment("tiny", "tiny", 1.5, (gpu_study.ALL_REDUCE, OTHER)),)


def packages() -> Iterator[tuple[str, str, str, list[tuple[str, Path]]]]:
    """Stand in for what is installed: the folders of this one."""
    for folder in sorted((ROOT / "jaxslowmo").glob("*/")):
        yield folder.name, "1.0", "MIT", [(str(x), x) for x in sorted(folder.glob("*.py"))]


def points(results: Path) -> int:
    return sum(len(row["history"]) for row in gpu_study.read_rows(results))


def call(folder: Path, *words: str, turns: float = float("inf")) -> None:
    """Run the tiny study until its results hold so many turns."""
    places = ["--state", str(folder / "state"), "--results", str(folder / "results")]
    arguments = gpu_study.parse(["--tiny", *places, *words])
    gpu_study.run(arguments, lambda: 1e9 if points(arguments.results) < turns else 0.0)


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Folders of a study in one call, and of the same in two, with the plan between them."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    patch = pytest.MonkeyPatch()
    patch.setattr(gpu_study, "TINY", TINY)
    patch.setattr(gpu_study.installed_text, "installed", packages)
    try:
        whole, cut = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cut")
        with standard():  # flax's LayerNorm promotes
            call(whole)
            call(cut, turns=TURNS)
            between = plan_in(cut)
            call(cut, "--last")
        yield SimpleNamespace(whole=whole, cut=cut, between=between)
    finally:
        patch.undo()
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_enable_compilation_cache", before[1])
        compilation_cache.reset_cache()


def plan_in(folder: Path) -> dict:
    (row,) = json.loads((folder / "results" / gpu_study.PLAN).read_text())["experiments"]
    return row


def without_seconds(results: Path) -> list[dict]:
    rows = gpu_study.read_rows(results)
    for row in rows:
        for point in row["history"]:
            del point["seconds"]
    return rows


def test_an_interrupted_study_goes_on_to_the_bit_and_the_plan_says_what_was_measured(studies):
    whole, cut = (without_seconds(x / "results") for x in (studies.whole, studies.cut))
    assert whole == cut
    (tiny,) = gpu_study.TINY
    assert [row["algorithm"] for row in whole] == list(tiny.algorithms)
    for row in whole:
        assert [point["updates"] for point in row["history"]] == tiny.turns
        losses = [np.mean(point["losses"]) for point in row["history"]]
        assert losses[-1] < losses[0] < np.log(256)
        assert {"jax", "devices"} <= row["machine"].keys()
        assert "optax" in row["versions"]
        assert len(row["commit"]) >= 7
    first, second = tiny.turns[:2]
    # All runs took a turn, and the first one two.
    assert studies.between["measured"]["done"] == {
        name: second if i < TURNS - len(tiny.algorithms) else first
        for i, name in enumerate(tiny.algorithms)
    }
    assert plan_in(studies.cut)["measured"]["done"] == dict.fromkeys(tiny.algorithms, tiny.updates)
    with pytest.raises(SystemExit, match="tiny is finished"):
        call(studies.cut)


def test_the_page_shows_what_the_results_give():
    page = report.PAGE.read_text("utf-8")
    results = gpu_study.Results(gpu_study.RESULTS, gpu_study.EXPERIMENTS, {})
    assert report.with_tables(page, report.tables(results)) == page
    assert report.PICTURE.exists()


def test_the_plan_is_that_of_the_experiments_and_fits():
    recorded = json.loads((gpu_study.RESULTS / gpu_study.PLAN).read_text("utf-8"))
    measured = {x["name"]: x["measured"] for x in recorded["experiments"] if x["measured"]}
    assert recorded == gpu_study.make_plan(gpu_study.EXPERIMENTS, measured)
    assert all(x["estimate"]["fits"] for x in recorded["experiments"])
