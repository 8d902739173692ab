"""Writes that fail, on one process or all: every process hears why, and may go on."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from checkpoint.runs import MODEL_STATE, PARAMS, leaf_bytes
from jaxslowmo.checkpoint import CheckpointError, Checkpoints, _writing
from jaxslowmo.checkpoint._folder import files_below
from jaxslowmo.checkpoint._writing import FolderWrite
from support.pairs import two_processes
from support.waiting import wait_until


def restored(folder, step):
    return Checkpoints(folder).restore(step, PARAMS, model_state=MODEL_STATE)


def test_orbax_itself_reads_what_was_written(tmp_path):
    target = epath.Path(tmp_path / "7")
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": jnp.ones(4, jnp.bfloat16)}
    FolderWrite(target, arrays, {"x": [1, 2]}, seconds=60).result()
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [7]
        own = ocp.checkpoint_utils.construct_restore_args(arrays)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeRestore(restore_args=own), record=ocp.args.JsonRestore()
        )
        found = manager.restore(7, args=items)
    np.testing.assert_array_equal(found.state["a"], arrays["a"])
    np.testing.assert_array_equal(np.asarray(found.state["b"]), np.asarray(arrays["b"]))
    assert found.record == {"x": [1, 2]}


def failing(number: int):
    def fail(*_, **__):
        raise OSError(number, "as the test says", "the/file")

    return fail


def test_a_save_that_fails_is_told_once_and_the_next_one_succeeds(
    step, state, tmp_path, monkeypatch
):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, wait=True)
        with monkeypatch.context() as patch:
            patch.setattr(ocp.PyTreeCheckpointHandler, "finalize", failing(errno.ENOSPC))
            checkpoints.save(2, state)
            with pytest.raises(CheckpointError) as caught:
                checkpoints.wait()
        assert caught.value.errno == errno.ENOSPC
        said = f"{tmp_path}: the checkpoint of step 2 could not be written (No space left on device"
        assert str(caught.value).startswith(said)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["1"]  # what was written is removed
        checkpoints.wait()
        checkpoints.save(3, state)
    assert Checkpoints(tmp_path).steps() == (1, 3)


def test_its_failure_is_known_as_soon_as_it_has_failed(step, state, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", failing(errno.EIO))
    checkpoints.save(2, state)
    wait_until(lambda: checkpoints.failure is not None)
    assert checkpoints.failure.errno == errno.EIO
    with pytest.raises(CheckpointError, match="step 2 could not be written"):
        checkpoints.save(3, state)  # and nothing is saved
    assert checkpoints.failure is None
    assert checkpoints.steps() == ()


def test_a_folder_that_cannot_be_made_fails_at_once(step, state, tmp_path):
    (tmp_path / "file").write_text("")
    checkpoints = Checkpoints(tmp_path / "file" / "below")
    with pytest.raises(CheckpointError, match=r"step 1 could not be written \(Not a directory"):
        checkpoints.save(1, state)
    checkpoints.close()


def test_files_that_are_deleted_meanwhile_are_missed(step, state, tmp_path, monkeypatch):
    check = FolderWrite._check_files

    def delete_first(self, path, parts):
        name, _ = next(files_below(path / "ocdbt.process_0"))
        (path / "ocdbt.process_0" / name).unlink()
        check(self, path, parts)

    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(FolderWrite, "_check_files", delete_first)
        checkpoints.save(1, state)
        with pytest.raises(CheckpointError, match=r"of process 0 is not in .*has nobody deleted"):
            checkpoints.wait()
    checkpoints.save(2, state, wait=True)
    assert leaf_bytes(restored(tmp_path, step).state) == leaf_bytes(state)


@pytest.mark.parametrize("late", [3, 10**6])
def test_a_folder_that_is_listed_as_it_was_is_waited_for(step, state, tmp_path, monkeypatch, late):
    """As on a file server: else a part would be left out of the whole, silently."""
    kind, listed = type(epath.Path(tmp_path)), []
    iterdir = kind.iterdir

    def remembered(self):
        if self.name == "state" and "finalize" not in listed:
            listed.append("list")
            return iter([]) if len(listed) <= late else iterdir(self)
        return iterdir(self)

    def finalize(self, directory, usual=ocp.PyTreeCheckpointHandler.finalize):
        listed.append("finalize")
        usual(self, directory)

    monkeypatch.setattr(_writing, "_LISTING_SECONDS", 1.0)
    monkeypatch.setattr(kind, "iterdir", remembered)
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", finalize)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    if late > 100:
        with pytest.raises(CheckpointError, match=r"state does not list \S+, which is there"):
            checkpoints.wait()
        return
    checkpoints.wait()
    assert listed == ["list"] * 4 + ["finalize"]
    assert leaf_bytes(restored(tmp_path, step).state) == leaf_bytes(state)


def test_a_clock_that_jumps_fails_no_save(step, state, tmp_path, monkeypatch):
    """By an hour, at every look at it, forth and back."""
    real, hour = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * (next(hour) % 3))
    with Checkpoints(tmp_path) as checkpoints:
        for t in range(3):
            checkpoints.save(t, state)
    assert checkpoints.steps() == (0, 1, 2)


@pytest.mark.parametrize("name", ["99999999999999999999", "2147483648", "007", "²", "-1"])
def test_other_folders_are_no_checkpoints(name, step, state, tmp_path):
    """A number that no counter of steps reaches, or that is not written as one."""
    (tmp_path / name / "state").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=False)
    assert checkpoints.steps() == ()
    for t in (3, 4):
        checkpoints.save(t, state)
    assert checkpoints.steps() == (4,)
    assert restored(tmp_path, step).step == 4
    assert (tmp_path / name / "state").exists()
    with pytest.raises(ValueError, match=r"`step` must be < 2\*\*31, got 2147483648"):
        checkpoints.save(2**31, state)


def test_old_ones_that_cannot_be_removed_are_a_warning(step, state, tmp_path, monkeypatch):
    from jaxslowmo.checkpoint import _checkpoints

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state, wait=True)
    monkeypatch.setattr(_checkpoints, "remove", failing(errno.EACCES))
    said = []
    monkeypatch.setattr("jaxslowmo.checkpoint._writing.warn_user", said.append)
    checkpoints.save(2, state, wait=True)
    assert len(said) == 1
    assert "old checkpoints could not be removed" in said[0]
    assert checkpoints.steps() == (1, 2)


def test_what_a_file_server_does_not_remove_yet_is_in_nobodys_way(
    step, state, tmp_path, monkeypatch
):
    """As files on NFS that another program has open: their folder cannot be removed."""
    said = []
    for name in ("_writing", "_folder"):
        monkeypatch.setattr(f"jaxslowmo.checkpoint.{name}.warn_user", said.append)
    checkpoints = Checkpoints(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(type(epath.Path(tmp_path)), "rmtree", failing(errno.EBUSY))
        for t in (1, 2, 2, 3):
            checkpoints.save(t, state, wait=True)
    assert checkpoints.steps() == (3,)
    assert len(said) == 3 + 3  # when it is to be removed, and before the saves after that
    assert all("could not be removed: [Errno 16]" in message for message in said)
    checkpoints.save(4, state, wait=True)
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


def test_a_kill_while_one_is_replaced_leaves_a_whole_one(step, state, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(path):
        whole = Checkpoints(tmp_path).steps()
        assert whole == (1,), f"{path} is removed, and complete are {whole}"
        raise Killed

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, wait=True)
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda hook: seen.append(hook.exc_type))
    monkeypatch.setattr(type(epath.Path(tmp_path)), "rmtree", kill)
    checkpoints.save(1, state, wait=True)
    assert seen == [Killed]


FORGETFUL = """
import sys, numpy as np, optax, orbax.checkpoint as ocp
import jaxslowmo as js
from jaxslowmo.checkpoint import Checkpoints

step = js.make_train_step(lambda p, b: (p["w"] * b).sum(), optax.sgd(0.1), sync="none",
                          mesh=js.virtual_mesh({"replica": 2}))
if sys.argv[2:]:
    def fail(*_):
        raise OSError(28, "as the test says")
    ocp.PyTreeCheckpointHandler.finalize = fail
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(7, step.init({"w": np.zeros(9, np.float32)}))
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_program_that_ends_without_waiting_loses_nothing_silently(tmp_path, fails):
    ended = subprocess.run(
        [sys.executable, "-c", FORGETFUL, tmp_path, *(["fails"] if fails else [])],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    is_told = "UserWarning: a checkpoint could not be written: " in ended.stderr
    # Python may still start the threads that it takes, or not any more.
    assert Checkpoints(tmp_path).steps() == (() if is_told else (7,))
    assert is_told or not fails


PROGRAM = """
import pathlib, resource, signal, time
import numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxslowmo as js
from jaxslowmo.checkpoint import Checkpoints, CheckpointError

folder = pathlib.Path(__file__).parent / "run"
mesh = js.make_mesh({"replica": 2})
step = js.make_train_step(lambda p, b: (p["w"] * b.mean()).sum(), optax.sgd(0.1),
                          sync=js.local_sgd("replica", sync_every=2), mesh=mesh)
state = step.init({"w": np.random.default_rng(0).normal(size=20_000).astype(np.float32)})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def limit(size):
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

with Checkpoints(folder, patience=600) as checkpoints:
    checkpoints.save(1, state, wait=True)
    for t in (2, 3):
        limit(30_000)  # process 1 cannot write
        checkpoints.save(t, state)
        begun = time.monotonic()
        try:
            checkpoints.wait()
            print("no error")
        except CheckpointError as error:
            is_named = "(process 1: File too large" in str(error)
            print(error.errno, is_named, time.monotonic() - begun < 250)
        limit(resource.RLIM_INFINITY)
    checkpoints.save(4, state)
    checkpoints.wait()
    print(checkpoints.steps(), checkpoints.restore(step, {"w": np.zeros(20_000, np.float32)}).step)

    # Process 0 cannot even begin.
    link = folder.with_name("link")
    if rank == 0:
        link.write_text("")
    try:
        Checkpoints(link, patience=600).save(1, state)
        print("no error")
    except CheckpointError as error:
        print("(process 0: " in str(error), error.errno)

impatient = Checkpoints(folder, patience=2)
if rank == 0:
    impatient.save(9, state)  # its collective for fingerprints needs both
    begun = time.monotonic()
    try:
        impatient.wait()
    except CheckpointError as error:
        print("has not answered for 2 s" in str(error), time.monotonic() - begun < 250)
    pathlib.Path(folder, "over").write_text("")
else:
    from jaxslowmo.checkpoint import _writing
    _writing.tell = lambda *_: None  # never says that it is done
    impatient.save(9, state)
    while not (folder / "over").exists():
        time.sleep(0.1)
    try:
        impatient.wait()
    except CheckpointError as error:
        print("could not be written" in str(error), True)
"""


def test_what_fails_on_one_process_fails_on_both_and_both_go_on(tmp_path):
    end = "27 True True\n27 True True\n(1, 4) 4\nTrue 17\nTrue True\n"
    assert two_processes(PROGRAM, tmp_path) == [end, end]
    record = json.loads(Path(tmp_path, "run", "4", "record", "metadata").read_text())
    assert record["replicas"] == 2


# Which checkpoints there are is process 0's to say, again and again.
LATE = """
import time
from jaxslowmo.checkpoint import Checkpoints, CheckpointError

jax.process_count()  # waits for the other
for name in "abc":
    if rank == 1 and name == "a":
        time.sleep(2)
    try:
        Checkpoints("/nowhere/" + name, patience=200).restore(None, {})
    except CheckpointError as error:
        print(str(error).partition(":")[0])
"""


def test_who_is_late_finds_the_notes_of_who_was_early(tmp_path):
    said = "".join(f"/nowhere/{name} has no complete checkpoint\n" for name in "abc")
    assert two_processes(LATE, tmp_path) == [said, said]
