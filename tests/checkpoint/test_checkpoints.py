"""A folder of checkpoints: what is kept, what is seen, and writes that fail."""

import errno
import os
import shutil
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from checkpoint.runs import MODEL_STATE, PARAMS, after, leaf_bytes, rewrite_record
from jaxslowmo.checkpoint import CheckpointError, Checkpoints
from jaxslowmo.checkpoint._record import FORMAT
from support.waiting import wait_until


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
        for t in (10, 7):
            checkpoints.save(t, after(state, t))
        assert checkpoints.steps() == (5, 7)
        assert (tmp_path / "10.set-aside1").exists()
        assert (checkpoints.failure, checkpoints.written()) == (None, 0)
        assert checkpoints.folder == str(tmp_path)
    assert (tmp_path / "run.json").exists()


LOSSES = [("min", 3.0, 1), ("min", 1.0, 2), ("min", np.nan, 2), ("min", 1.0, 4)]
RATES = [("max", 3.0, 1), ("max", 5.0, 2), ("max", -np.inf, 2)]


@pytest.mark.parametrize("rows", [LOSSES, RATES], ids=["min", "max"])
def test_the_best_is_kept_beside_the_newest_and_after_a_restart(rows, state, tmp_path):
    """Of equal values the newest is the best, and a NaN never is."""
    for t, (mode, value, best) in enumerate(rows, 1):
        with Checkpoints(tmp_path, keep=1, keep_best=("it", mode)) as checkpoints:
            assert checkpoints.best_step() == (rows[t - 2][2] if t > 1 else None)
            checkpoints.save(t, after(state, t), metrics={"it": value, "other": 7}, wait=True)
            assert checkpoints.best_step() == best
            assert checkpoints.steps() == tuple(sorted({best, t}))


def test_one_that_is_not_complete_is_not_seen(state, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, after(state, 1), wait=True)
        shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
        assert checkpoints.steps() == (1,)
        checkpoints.save(2, after(state, 2), wait=True)
        assert checkpoints.steps() == (1, 2)
        assert not (tmp_path / "2.orbax-checkpoint-tmp").exists()


def test_a_record_is_checked_but_may_have_what_other_versions_note(step, state, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, after(state, 3), extra={"position": 21})
    record = tmp_path / "3" / "record" / "metadata"
    rewrite_record(tmp_path / "3", lambda value: value.update(of_tomorrow=[1]))
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


def failing(error: BaseException):
    def fail(*_, **__):
        raise error

    return fail


FULL = OSError(errno.ENOSPC, "as the test says", "the/file")


def test_a_save_that_fails_is_told_once_and_the_next_one_succeeds(state, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, after(state, 1), wait=True)
    for call in (checkpoints.wait, checkpoints.close, lambda: checkpoints.save(3, after(state, 3))):
        with monkeypatch.context() as patch:
            patch.setattr(ocp.PyTreeCheckpointHandler, "finalize", failing(FULL))
            checkpoints.save(2, after(state, 2))
            wait_until(lambda: checkpoints.failure is not None)
            assert checkpoints.failure.errno == errno.ENOSPC
            with pytest.raises(CheckpointError, match=r"run: .*step 2 .*No space left") as caught:
                call()  # and nothing is saved
        assert caught.value.errno == errno.ENOSPC
        assert str(checkpoints.folder) not in caught.value.reason
        assert checkpoints.failure is None
        assert [p.name for p in (tmp_path / "run").iterdir()] == ["1"]  # what was written is gone
        checkpoints.wait()
    checkpoints.save(3, after(state, 3), wait=True)
    assert checkpoints.steps() == (1, 3)


def test_only_what_the_operating_system_refuses_is_blamed_on_the_disk(state, tmp_path, monkeypatch):
    for error, blamed in ((KeyError("of ours"), False), (FULL, True)):
        make_folder = "jaxslowmo.checkpoint._writing.FolderWrite._make_folder"
        monkeypatch.setattr(make_folder, failing(error))
        with pytest.raises(CheckpointError) as caught:
            Checkpoints(tmp_path).save(1, after(state, 1))
        assert ("Is there space" in str(caught.value)) == blamed


def test_what_a_file_server_does_not_remove_yet_is_in_nobodys_way(state, tmp_path, monkeypatch):
    """Imitate files on NFS that another program has open: their folder cannot be removed."""
    said = []
    monkeypatch.setattr("jaxslowmo.checkpoint._writing.warn_user", said.append)
    checkpoints = Checkpoints(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        busy = OSError(errno.EBUSY, "busy")
        patch.setattr(type(epath.Path(tmp_path)), "rmtree", failing(busy))
        for t in (1, 2, 2, 3):
            checkpoints.save(t, after(state, t), wait=True)
    assert checkpoints.steps() == (3,)
    assert len(said) == 3 + 3  # when it is to be removed, and before the saves after that
    assert all("could not be removed: [Errno 16]" in message for message in said)
    checkpoints.save(4, after(state, 4), wait=True)
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


def test_a_kill_while_one_is_replaced_leaves_a_whole_one(state, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, after(state, 1), wait=True)
    monkeypatch.setattr(type(epath.Path(tmp_path)), "rmtree", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(1, after(state, 1), wait=True)
    assert Checkpoints(tmp_path).steps() == (1,)


FORGETFUL = """
import sys
from importlib import metadata
known = metadata.version
def version(name):
    if name == "jaxslowmo":
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.version = version
import numpy as np, optax, orbax.checkpoint as ocp
import jaxslowmo as js
from jaxslowmo.checkpoint import Checkpoints

params = {"w": np.zeros(9, np.float32)}
step = js.make_train_step(lambda p, b: (p["w"] * b).sum(), optax.sgd(0.1), sync="none",
                          mesh=js.virtual_mesh({"replica": 2}))
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(0, step.init(params), wait=True)
print(js.__version__, checkpoints.restore(step, params).is_exact)
def fail(*_):
    raise OSError(28, "as the test says")
ocp.PyTreeCheckpointHandler.finalize = fail
state = step.init(params)
checkpoints.save(1, state._replace(step=state.step + 1))
"""


def test_a_program_of_a_checkout_that_ends_without_waiting_is_told_that_its_save_failed(tmp_path):
    """A checkout that is not installed has no version of its own."""
    command = [sys.executable, "-c", FORGETFUL, tmp_path]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert ended.stdout == "0+checkout True\n"
    said = f"UserWarning: {tmp_path}: the checkpoint of step 1 could not be written"
    assert said in ended.stderr
    assert Checkpoints(tmp_path).steps() == (0,)
