"""Where `jaxslowmo sample` finds the model of a run: checkpoints of all kinds, exports."""

import json
import shutil
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxslowmo.checkpoint import load_consensus
from jaxslowmo.cli import main
from jaxslowmo.cli._sample import _shown, find_model
from jaxslowmo.models import GPT_PRESETS
from support.exhaustive import sweep

# Runs that most tests read: all on one worker.
pytestmark = pytest.mark.xdist_group("sample")

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint_0.1.0" / "run.tar.xz"
TINY = (
    "train", "--preset", "tiny", "--eval-batches", 1, "--batch", 2, "--optimizer", "sgd", "--clip",
    0, "--learning-rate", 0.3, "--steps", 5, "--checkpoint-every", 3, "--export",
)  # fmt: skip


def train(folder, *options):
    text = folder / "text"
    text.mkdir()
    for i in range(10):
        (text / f"{i}.txt").write_text(f"File {i} says hello to the world.\n" * 40)
    argv = [*TINY, *options, "--data", text, "--out", folder / "out"]
    with pytest.raises(SystemExit) as left:
        main([str(x) for x in argv])
    assert left.value.code == 0
    return folder / "out"


@pytest.fixture(scope="module")
def gossip(tmp_path_factory):
    """Three replicas that differ, with something in flight."""
    options = ("--algorithm", "sgp", "--replicas", 3, "--overlap", 2, "--check-parameters")
    return train(tmp_path_factory.mktemp("gossip"), *options)


@pytest.fixture(scope="module")
def levels(tmp_path_factory):
    """Two replicas of two devices, with sharded state, that accumulate."""
    options = ("--algorithm", "diloco", "--slow-every", 2, "--replicas", 2)
    spread = ("--devices-per-replica", 2, "--batch", 4, "--accumulate", 2)
    return train(tmp_path_factory.mktemp("levels"), *options, *spread)


def leaves(params):
    return [np.asarray(x) for x in jax.tree.leaves(params)]


@pytest.mark.parametrize("run", sweep(["gossip", "levels"], "gossip".__eq__))
def test_the_model_of_a_checkpoint_is_what_was_exported(run, request):
    out = request.getfixturevalue(run)
    model, params = find_model(out, None)
    assert model == GPT_PRESETS["tiny"]
    exported = load_consensus(out / "model", like=params)
    for a, b in zip(leaves(params), leaves(exported), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-8)
    _, earlier = find_model(out, 3)
    assert any(
        np.abs(a - b).max() > 1e-4 for a, b in zip(leaves(params), leaves(earlier), strict=True)
    )


def test_an_exported_model(gossip, tmp_path):
    shutil.copytree(gossip / "model", tmp_path / "alone")
    _, params = find_model(gossip, None)
    for folder in (tmp_path / "alone", gossip / "model"):
        model, found = find_model(folder, None)
        assert model == GPT_PRESETS["tiny"]
        assert jax.tree.structure(found) == jax.tree.structure(params)
    # A run that kept no checkpoint.
    only = shutil.copytree(gossip, tmp_path / "only")
    shutil.rmtree(only / "checkpoints")
    for a, b in zip(leaves(find_model(only, None)[1]), leaves(found), strict=True):
        assert np.array_equal(a, b)


def test_a_run_of_0_1_0(tmp_path):
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    model, params = find_model(tmp_path / "out", None)
    assert model == GPT_PRESETS["tiny"]
    assert all(np.isfinite(x).all() for x in leaves(params))


def test_the_command_is_deterministic_and_says_the_prompt(call, gossip):
    ask = ("sample", gossip, "--prompt", "File 3 says", "--tokens", 40)
    first = call(*ask)
    assert (first.code, first.err) == (0, "")
    assert first.out.startswith("File 3 says")
    assert call(*ask).out == first.out
    assert call(*ask, "--step", 5).out == first.out
    assert call(*ask, "--seed", 1).out != first.out
    assert call(*ask, "--step", 3).out != first.out


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (None, (), "RUN must be the folder of a run or of an exported model, got"),
        ([], (), "holds no model: neither checkpoints (train with --checkpoint-every) nor an"),
        (["metrics.jsonl"], (), "holds no model: neither checkpoints"),
        (["checkpoints/"], ("--step", 3), "has no complete checkpoint"),
        (["checkpoints/4/"], (), "checkpoints/4"),
        (["record/", "state/"], (), "is no model that export_consensus wrote"),
    ],
)
def test_what_holds_no_model(call, tmp_path, make, options, words):
    run = tmp_path / "run"
    for name in make or []:
        path = run / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    if make == []:
        run.mkdir()
    outcome = call("sample", run, *options)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert words in outcome.err


def test_a_step_that_was_not_saved_and_checkpoints_of_another_program(call, gossip, tmp_path):
    outcome = call("sample", gossip, "--step", 4)
    assert outcome.code == 2
    assert "has no checkpoint of step 4: it has those of steps 3, 5." in outcome.err
    other = shutil.copytree(gossip, tmp_path / "other")
    record = other / "checkpoints" / "5" / "record" / "metadata"
    value = json.loads(record.read_text())
    value["extra"] = {}
    value.pop("crc32", None)
    record.write_text(json.dumps(value))
    outcome = call("sample", other)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)


def test_a_damaged_checkpoint_names_the_option_that_takes_the_one_before(call, gossip, tmp_path):
    run = shutil.copytree(gossip, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "5" / "state")
    outcome = call("sample", run)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "fallback" not in outcome.err
    assert outcome.err.endswith("--step 3 takes the one before.\n")


@pytest.mark.parametrize(
    ("text", "encoding", "shown"),
    [
        (b"a\tb\r\n\x0c", "utf-8", "a\tb\r\n\x0c"),
        (b"\x1b[2J\x07\x00\xc2\x9b", "utf-8", "\ufffd[2J\ufffd\ufffd\ufffd"),
        ("a \xff é".encode() + b"\xff", "utf-8", "a \xff é\ufffd"),
        ("é".encode() + b"\xff.", "ascii", "??."),
    ],
)
def test_what_is_printed_neither_fails_nor_steers_the_terminal(text, encoding, shown):
    assert _shown(text, encoding) == shown


def test_an_export_that_does_not_say_what_it_is(call, gossip, tmp_path):
    """As those of before 0.2: the configuration of its run says it."""
    run = shutil.copytree(gossip, tmp_path / "run")
    record = run / "model" / "record" / "metadata"
    value = json.loads(record.read_text())
    assert value["extra"]["model"]["num_layers"] == 1
    value["extra"] = {}
    record.write_text(json.dumps(value))
    model, params = find_model(run / "model", None)
    assert model == GPT_PRESETS["tiny"]
    for a, b in zip(leaves(params), leaves(find_model(gossip / "model", None)[1]), strict=True):
        assert np.array_equal(a, b)
    (run / "config.json").unlink()
    outcome = call("sample", run / "model")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "does not say what model it is: put the config.json of its run next to it" in outcome.err
