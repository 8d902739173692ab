"""A folder of checkpoints: what is kept, what is seen, and what a record must say."""

import logging
import os
import shutil
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest

from checkpoint.runs import MODEL_STATE, PARAMS, after, leaf_bytes, rewrite_record
from jaxslowmo.checkpoint import CheckpointError, Checkpoints
from jaxslowmo.checkpoint._record import FORMAT


def restore(folder, train_step, **options):
    return Checkpoints(folder).restore(train_step, PARAMS, model_state=MODEL_STATE, **options)


def test_the_newest_are_kept_beside_other_files(step, state, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    # What no counter of steps reaches, or is not written as a number, is no checkpoint.
    for name in ("99999999999999999999", "2147483648", "007", "²", "-1"):
        (tmp_path / name / "state").mkdir(parents=True)
    with Checkpoints(tmp_path, keep=2, asynchronous=False) as checkpoints:
        assert checkpoints.steps() == ()
        for t in (1, 5, 10):
            checkpoints.save(t, after(state, t), extra={"t": t})
        assert checkpoints.steps() == (5, 10)
        assert [checkpoints.extra(step=t) for t in (None, 5)] == [{"t": 10}, {"t": 5}]
        # Back to 5, and on: what came after it is of another course of the run.
        checkpoints.save(5, after(state, 5), extra={"again": True})
        assert checkpoints.steps() == (5,)
        assert restore(tmp_path, step).extra == {"again": True}
        assert (tmp_path / "10.set-aside" / "record").exists()
        checkpoints.close()
        checkpoints.save(11, after(state, 11))
        assert checkpoints.steps() == (5, 11)
        checkpoints.save(7, after(state, 7))
        checkpoints.save(11, after(state, 11))
        checkpoints.save(8, after(state, 8))
        assert checkpoints.steps() == (7, 8)
        assert (tmp_path / "11.set-aside1").exists()
        assert (checkpoints.failure, checkpoints.written()) == (None, 0)
        assert checkpoints.folder == str(tmp_path)
    assert (tmp_path / "run.json").exists()
    assert (tmp_path / "007" / "state").exists()


LOSSES = [("min", 3.0, 1), ("min", 1.0, 2), ("min", np.nan, 2), ("min", 1.0, 4), ("min", -1, 5)]
RATES = [("max", 3.0, 1), ("max", 5.0, 2), ("max", -np.inf, 2), ("max", np.float32(5), 4)]


@pytest.mark.parametrize("rows", [LOSSES, RATES], ids=["min", "max"])
def test_the_best_is_kept_beside_the_newest_and_after_a_restart(rows, step, state, tmp_path):
    """Of equal values the newest is the best, and a NaN never is."""
    for t, (mode, value, best) in enumerate(rows, 1):
        with Checkpoints(tmp_path, keep=1, keep_best=("it", mode)) as checkpoints:
            assert checkpoints.best_step() == (rows[t - 2][2] if t > 1 else None)
            checkpoints.save(t, after(state, t), metrics={"it": value, "other": 7}, wait=True)
            assert checkpoints.best_step() == best
            assert checkpoints.steps() == tuple(sorted({best, t}))
            assert restore(tmp_path, step, step=best).step == best


def test_the_best_of_what_counts(step, state, tmp_path):
    """What has no metric, cannot be read, or is set aside, is not the best."""
    with Checkpoints(tmp_path, keep=4) as checkpoints:
        checkpoints.save(1, after(state, 1), metrics={"loss": 9})
        checkpoints.save(2, after(state, 2))
        checkpoints.save(3, after(state, 3), metrics={"loss": np.nan})
    with Checkpoints(tmp_path, keep=2, keep_best=("loss", "min")) as checkpoints:
        assert checkpoints.best_step() == 1
        checkpoints.save(4, after(state, 4), metrics={"loss": 2}, wait=True)
        assert checkpoints.steps() == (3, 4)
        checkpoints.save(3, after(state, 3), metrics={"loss": 8}, wait=True)
        assert (checkpoints.best_step(), checkpoints.steps()) == (3, (3,))
        checkpoints.save(4, after(state, 4), metrics={"loss": 1}, wait=True)
        (tmp_path / "4" / "record" / "metadata").write_text("{")
        assert checkpoints.best_step() == 3


def test_one_that_is_not_complete_is_not_seen(step, state, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, after(state, 1), wait=True)
        shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
        assert checkpoints.steps() == (1,)
        assert restore(tmp_path, step).step == 1
        checkpoints.save(2, after(state, 2), wait=True)
        assert checkpoints.steps() == (1, 2)
        assert not (tmp_path / "2.orbax-checkpoint-tmp").exists()


def test_of_another_library(step, tmp_path):
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        item = ocp.args.PyTreeSave({"w": np.ones(2)})
        checkpointer.save(tmp_path / "7", args=ocp.args.Composite(default=item))
        other = ocp.args.Composite(default=item, record=ocp.args.JsonSave({"format": 1}))
        checkpointer.save(tmp_path / "8", args=other)
    for t, said in ((8, r"8 .*not written by jaxslowmo"), (7, r"7 .*record/metadata")):
        with pytest.raises(CheckpointError, match=said):
            restore(tmp_path, step, step=t)


def test_a_record_is_checked_but_may_have_what_other_versions_note(step, state, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, after(state, 3), extra={"position": 21})
    record = tmp_path / "3" / "record" / "metadata"

    def of_other_versions(value):
        value["of_tomorrow"] = [1]

    rewrite_record(tmp_path / "3", of_other_versions)
    found = restore(tmp_path, step)
    assert (found.step, found.is_exact, found.extra) == (3, True, {"position": 21})
    assert leaf_bytes(found.state) == leaf_bytes(after(state, 3))
    whole = record.read_text()
    record.write_text(whole.replace("21", "22"))
    with pytest.raises(CheckpointError, match="3 is damaged"):
        restore(tmp_path, step)
    record.write_text(whole)
    rewrite_record(tmp_path / "3", lambda value: value.update(jaxslowmo_checkpoint=FORMAT + 1))
    with pytest.raises(CheckpointError, match=rf"format {FORMAT + 1}, .* reads format {FORMAT}:"):
        restore(tmp_path, step, fallback=True)


def test_orbax_is_quiet(step, state, tmp_path, caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        with Checkpoints(tmp_path) as checkpoints:
            for t in range(3):
                checkpoints.save(t, after(state, t))
        restore(tmp_path, step)
        logging.getLogger("absl").warning("not orbax")
    assert [r.message for r in caplog.records if r.name == "absl"] == ["not orbax"]
    assert capfd.readouterr().out == ""


NOT_INSTALLED = """
import sys
from importlib import metadata
known = metadata.version
def version(name):
    if name == "jaxslowmo":
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.version = version
import numpy as np, optax
import jaxslowmo as js
from jaxslowmo.checkpoint import Checkpoints
step = js.make_train_step(lambda p, b: (p["w"] * b).sum(), optax.sgd(0.1), sync="none",
                          mesh=js.virtual_mesh({"replica": 2}))
with Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(0, step.init({"w": np.zeros(9, np.float32)}))
print(js.__version__, checkpoints.restore(step, {"w": np.zeros(9, np.float32)}).is_exact)
"""


def test_a_checkout_that_is_not_installed_saves(tmp_path):
    command = [sys.executable, "-c", NOT_INSTALLED, tmp_path / "run"]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert ended.stdout == "0+checkout True\n"


def test_only_what_the_operating_system_refuses_is_blamed_on_the_disk(state, tmp_path, monkeypatch):
    for error, blamed in ((KeyError("of ours"), False), (OSError(28, "full"), True)):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr("jaxslowmo.checkpoint._writing.FolderWrite._make_folder", fail)
        with pytest.raises(CheckpointError) as caught:
            Checkpoints(tmp_path).save(1, after(state, 1))
        assert ("Is there space" in str(caught.value)) == blamed
