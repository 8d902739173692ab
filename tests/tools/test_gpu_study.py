"""The study by size: its text, its plan, a tiny run that is interrupted, and its report."""

import email.message
import itertools
import json
import sys
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
    import installed_text
finally:
    sys.path.remove(str(ROOT / "benchmarks"))

import jaxslowmo as js  # noqa: E402
from jaxslowmo.cli._config import PRESETS  # noqa: E402
from jaxslowmo.cli._setup import make_step  # noqa: E402
from jaxslowmo.models import gpt_preset, num_parameters  # noqa: E402
from support.promotion import standard  # noqa: E402

GROUP = pytest.mark.xdist_group("gpu study")  # they share three tiny runs
TURNS = 5


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
    try:
        whole, cut = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cut")
        with standard():  # flax's LayerNorm promotes
            call(whole)
            call(cut, turns=TURNS)
            between = plan_in(cut)
            call(cut, "--last")
        yield SimpleNamespace(whole=whole, cut=cut, between=between)
    finally:
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


@GROUP
def test_an_interrupted_study_goes_on_to_the_bit(studies):
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


@GROUP
def test_the_plan_says_what_was_measured(studies):
    (tiny,) = gpu_study.TINY
    first, second = tiny.turns[:2]
    # All runs took a turn, and the first one two.
    assert studies.between["measured"]["done"] == {
        name: second if i < TURNS - len(tiny.algorithms) else first
        for i, name in enumerate(tiny.algorithms)
    }
    assert plan_in(studies.cut)["measured"]["done"] == dict.fromkeys(tiny.algorithms, tiny.updates)
    with pytest.raises(SystemExit, match="tiny is finished"):
        call(studies.cut)


@GROUP
def test_prices_of_the_tiny_study(studies, tmp_path):
    rows = gpu_study.read_rows(studies.whole / "results")
    by_name = {row["algorithm"]: row for row in rows}
    base = by_name.pop(gpu_study.ALL_REDUCE)
    found = report.prices(rows)
    assert [x[0].row["algorithm"] for x in found] == list(by_name)
    for algorithm in found:
        last, row = algorithm[-1], algorithm[-1].row
        means = [np.mean(x["history"][-1]["losses"]) for x in (row, base)]
        assert last.price == pytest.approx(means[0] / means[1] - 1)
        assert last.low <= last.price <= last.high
    text = report.price_table(rows)
    assert text.count("100 % |") == len(by_name)
    report.draw(rows, tmp_path / "prices.png")
    assert (tmp_path / "prices.png").stat().st_size > 20_000


def test_without_a_gpu_nothing_is_trained(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gpu_study.py", "--state", str(tmp_path / "state")])
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(SystemExit, match="jax sees no GPU"):
        gpu_study.main()
    assert not (tmp_path / "state").exists()


def row_of(algorithm: str, *losses: list[float], text: str = "one") -> dict:
    history = [{"updates": 32 * (i + 1), "losses": x} for i, x in enumerate(losses)]
    settings = {"preset": "1m", "algorithm": algorithm, "updates": 64, "text": text}
    return settings | {"history": history, "parameters": 1000, "bytes_per_update": 300}


def test_prices_are_paired_and_of_equal_updates_and_text():
    reference = row_of("all_reduce", [4.0, 2.0, 3.0], [2.0, 1.0, 1.5])
    # A tenth more on every family: families that are harder for both do not widen the interval.
    behind = row_of("local_sgd", [4.4, 2.2, 3.3])
    (one,), (first, last) = report.prices(
        [reference, behind, row_of("diloco", [4.0, 2.0, 3.3], [2.0, 1.0, 2.1])]
    )
    assert (one.updates, one.price, one.low, one.high) == pytest.approx((32, 0.1, 0.1, 0.1))
    assert one.bytes_per_parameter == pytest.approx(9.6)
    assert (first.updates, last.updates) == (32, 64)
    assert last.price == pytest.approx(5.1 / 4.5 - 1)
    assert last.low == pytest.approx(0.0)  # that of samples without the third family
    assert report.at([first, last], 10.0) == report.percent(first)
    assert report.at([first, last], 0.5) == ""
    assert report.prices([reference, row_of("diloco", [4.0, 2.0, 3.0], text="other")]) == []


def test_the_law_is_near_its_table():
    for size, (base, other) in report.PUBLISHED.items():
        assert report.law(size) == pytest.approx(other / base - 1, abs=0.002)


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
    order = [(x.preset, x.bytes_per_parameter) for x in gpu_study.EXPERIMENTS]
    assert order[:3] == [("10m", 20), ("40m", 5), ("124m", 0.5)]
    for experiment in gpu_study.EXPERIMENTS:
        turns = np.array(experiment.turns)
        size = num_parameters(gpt_preset(experiment.preset))
        for mark in gpu_study.MARKS:
            if mark <= experiment.bytes_per_parameter:
                updates = mark * size / experiment.bytes_per_update
                assert np.abs(turns - updates).min() <= gpu_study.PERIOD / 2
        assert not np.any(turns % gpu_study.PERIOD)
        assert experiment.turns[-1] == experiment.updates


@pytest.mark.parametrize("preset", ["1m", "10m", "40m", "124m"])
def test_runs_of_an_experiment_differ_by_algorithm_and_rate_alone(preset):
    experiment = gpu_study.Experiment("all", preset, 1, tuple(gpu_study.ALGORITHMS))
    peak = PRESETS[preset].get("learning_rate", 1e-3)
    for name in experiment.algorithms:
        config = gpu_study.config_for(experiment, name)
        assert config.optimizer.learning_rate == peak * (1 if name == "all_reduce" else 0.5)
        window = gpt_preset(preset).context_length
        rows = config.data.batch * config.mesh.num_replicas
        assert rows * window == experiment.bytes_per_update
        assert (config.run.steps, config.model.dtype, config.model.attention) == (
            experiment.updates,
            "bfloat16",
            "xla",
        )
        step = make_step(config, lambda params, batch: 0.0, js.virtual_mesh({"replica": 4}))
        assert (step.sync is None) == (name == "all_reduce")
        if step.sync is not None:
            due = [t for t in range(1, 33) if step.sync.due(t)]
            assert due[-1] == 32
            assert ("4 fragments" in name) == (len(due) > 1)


def source(*lines: str, copies: int = 1500) -> bytes:
    return "".join(
        f"{line} = value_{i}_of_a_module\n" for i in range(copies) for line in lines
    ).encode()


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """Packages by name, with files as text, in place of the installed ones."""
    made = {}

    def add(name, licence="MIT", **files):
        for label, text in files.items():
            path = tmp_path / "site" / name / f"{label}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
            made.setdefault(name, (licence, []))[1].append((f"{name}/{label}.py", path))

    def installed():
        for name, (licence, files) in sorted(made.items()):
            yield name, "1.0", licence, files

    monkeypatch.setattr(installed_text, "installed", installed)
    return add


def test_families_are_held_out_as_a_whole_and_contents_are_taken_once(packages, tmp_path):
    for i in range(12):
        packages(f"alone{i}", a=source(f"name_{i}", f"other_{i}"))
        packages(f"family{i}", a=source(f"first_{i}", f"more_{i}"))
        packages(f"family{i}-plugin", "BSD", a=source(f"second_{i}"), same=b"licence = 'text'\n")
    packages("binary", a=b"\0" + source("binary"))
    seen = set()
    for seed in range(4):
        folder = tmp_path / f"text{seed}"
        summary = installed_text.write(folder, seed)
        rows = {row["family"]: row for row in summary["families"]}
        assert rows["family0"]["packages"] == ["family0 1.0", "family0-plugin 1.0"]
        assert rows["family0"]["licences"] == ["BSD", "MIT"]
        assert "binary" not in rows
        assert 1 <= len(summary["held_out"]) <= len(rows) // 3
        parts = {}
        for line in (folder / "files.tsv").read_text().splitlines():
            part, family, size, digest, label = line.split("\t")
            parts.setdefault(family, set()).add(part)
            parts.setdefault(digest, []).append((part, int(size), label))
        files = [x[0] for x in parts.values() if isinstance(x, list)]
        assert all(len(x) == 1 for x in parts.values())
        training, held_out = (np.load(folder / f"{x}.npy") for x in ("training", "held_out"))
        sizes = {p: sum(s for part, s, _ in files if part == p) for p in ("training", "held out")}
        assert (training.size, held_out.size) == (sizes["training"], sizes["held out"])
        assert summary["training_bytes"] == training.size
        assert installed_text.write(folder, seed) == summary  # again the same
        assert "WARNING: less than 200 MB" in installed_text.describe(summary)
        seen.add(tuple(summary["held_out"]))
    assert len(seen) > 1


def test_a_copy_of_training_text_is_not_held_out(packages, tmp_path):
    for i in range(6):
        packages(f"large{i}", a=source(*(f"name_{i}_{j}" for j in range(60))))  # is never held out
        # A vendored copy with other imports.
        packages(f"copy{i}", a=b"import large\n" + source(f"name_{i}_0", f"name_{i}_1"))
        packages(f"own{i}", a=source(f"own_{i}", f"mine_{i}"))
    for seed in range(4):
        held_out = installed_text.write(tmp_path / "text", seed)["held_out"]
        assert all(name.startswith("own") for name in held_out)


def test_too_few_packages_are_refused(packages, tmp_path):
    packages("alone", a=source("name"))
    with pytest.raises(ValueError, match="three families"):
        installed_text.write(tmp_path / "text")


def test_licences_of_metadata():
    def licence(*headers: tuple[str, str]) -> str:
        metadata = email.message.Message()
        for name, value in headers:
            metadata[name] = value
        return installed_text.licence_of(metadata)

    classifier = ("Classifier", "License :: OSI Approved :: BSD License")
    text = ("License", "Copyright (c) 2001\nAll rights reserved.")
    for others in itertools.permutations([classifier, text]):
        assert licence(("License-Expression", "MIT"), *others) == "MIT"
        assert licence(*others) == "BSD License"
    assert licence(text) == "Copyright (c) 2001"
    assert licence(("Classifier", "Topic :: Software")) == "unknown"
