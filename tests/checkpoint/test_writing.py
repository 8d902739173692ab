"""Writes that fail, on one process or all: every process hears why, and may go on."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import orbax.checkpoint as ocp
import pytest
from etils import epath

from checkpoint.runs import MODEL_STATE, PARAMS, after
from jaxslowmo.checkpoint import CheckpointError, Checkpoints
from support.pairs import two_processes
from support.waiting import wait_until


def restored(folder, step):
    return Checkpoints(folder).restore(step, PARAMS, model_state=MODEL_STATE)


def failing(number: int):
    def fail(*_, **__):
        raise OSError(number, "as the test says", "the/file")

    return fail


def test_a_save_that_fails_is_told_once_and_the_next_one_succeeds(state, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, after(state, 1), wait=True)
    for call in (checkpoints.wait, checkpoints.close, lambda: checkpoints.save(3, after(state, 3))):
        with monkeypatch.context() as patch:
            patch.setattr(ocp.PyTreeCheckpointHandler, "finalize", failing(errno.ENOSPC))
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
    (tmp_path / "file").write_text("")
    with (
        Checkpoints(tmp_path / "file" / "below") as checkpoints,
        pytest.raises(CheckpointError, match=r"step 1 .*Not a directory"),
    ):
        checkpoints.save(1, after(state, 1))


def test_what_a_file_server_does_not_remove_yet_is_in_nobodys_way(
    step, state, tmp_path, monkeypatch
):
    """Imitate files on NFS that another program has open: their folder cannot be removed."""
    said = []
    monkeypatch.setattr("jaxslowmo.checkpoint._writing.warn_user", said.append)
    checkpoints = Checkpoints(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(type(epath.Path(tmp_path)), "rmtree", failing(errno.EBUSY))
        for t in (1, 2, 2, 3):
            checkpoints.save(t, after(state, t), wait=True)
    assert checkpoints.steps() == (3,)
    assert len(said) == 3 + 3  # when it is to be removed, and before the saves after that
    assert all("could not be removed: [Errno 16]" in message for message in said)
    checkpoints.save(4, after(state, 4), wait=True)
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


def test_a_kill_while_one_is_replaced_leaves_a_whole_one(step, state, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(path):
        whole = Checkpoints(tmp_path).steps()
        assert whole == (1,), f"{path} is removed, and complete are {whole}"
        raise Killed

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, after(state, 1), wait=True)
    monkeypatch.setattr(type(epath.Path(tmp_path)), "rmtree", kill)
    with pytest.raises(Killed):
        checkpoints.save(1, after(state, 1), wait=True)


FORGETFUL = """
import sys, numpy as np, optax, orbax.checkpoint as ocp
import jaxslowmo as js
from jaxslowmo.checkpoint import Checkpoints

step = js.make_train_step(lambda p, b: (p["w"] * b).sum(), optax.sgd(0.1), sync="none",
                          mesh=js.virtual_mesh({"replica": 2}))
def fail(*_):
    raise OSError(28, "as the test says")
ocp.PyTreeCheckpointHandler.finalize = fail
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(0, step.init({"w": np.zeros(9, np.float32)}))
"""


def test_a_program_that_ends_without_waiting_is_told_that_its_save_failed(tmp_path):
    command = [sys.executable, "-c", FORGETFUL, tmp_path]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    said = f"UserWarning: {tmp_path}: the checkpoint of step 0 could not be written"
    assert said in ended.stderr
    assert Checkpoints(tmp_path).steps() == ()


PROGRAM = """
import itertools, pathlib, resource, signal, time
import numpy as np, optax
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxslowmo as js
from jaxslowmo.checkpoint import Checkpoints, CheckpointError, _writing

# Which checkpoints there are is process 0's to say, again and again: also to who is late.
for name in "abc":
    time.sleep(0.5 * (rank == 1 and name == "a"))
    try:
        Checkpoints("/nowhere/" + name, patience=200).restore(None, {})
    except CheckpointError as error:
        print(str(error).partition(" ")[0])

folder = pathlib.Path(__file__).parent / "run"
kind = type(epath.Path(folder))
walk = kind.walk
mesh = js.make_mesh({"replica": 2})
step = js.make_train_step(lambda p, b: (p["w"] * b.mean()).sum(), optax.sgd(0.1),
                          sync=js.local_sgd("replica", sync_every=2), mesh=mesh)
state = step.init({"w": np.random.default_rng(0).normal(size=20_000).astype(np.float32)})

def after(updates):
    return state._replace(step=state.step + updates)

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def limit(size):
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

with Checkpoints(folder, patience=600) as checkpoints:
    checkpoints.save(1, after(1), wait=True)
    for t in (2, 3):
        limit(30_000)  # process 1 cannot write
        checkpoints.save(t, after(t))
        try:
            checkpoints.wait()
            print("no error")
        except CheckpointError as error:
            is_named = "(process 1: File too large" in str(error)
            print(error.errno, is_named)
        limit(resource.RLIM_INFINITY)
    checkpoints.save(4, after(4))
    checkpoints.wait()
    print(checkpoints.steps(), checkpoints.restore(step, {"w": np.zeros(20_000, np.float32)}).step)

    # A file server's client lists what was there a while ago, or nothing that others write.
    _writing._LISTING_SECONDS = 0.01
    for t, late in ((5, 30), (6, 10**6)):
        def as_it_was(self, seen=itertools.count(), late=late):
            others = rank == 0 and self.name == "state" and next(seen) < late
            return (x for x in walk(self) if not (others and "_1" in str(x[0].relative_to(self))))
        kind.walk = as_it_was
        checkpoints.save(t, after(t))
        try:
            checkpoints.wait()
            kind.walk = walk
            print(checkpoints.restore(step, {"w": np.zeros(20_000, np.float32)}).step)
        except CheckpointError as error:
            print("process 1 sees other files" in str(error))
        kind.walk = walk

    # The best is what process 0 says.
    with Checkpoints(folder.with_name("best"), keep=1, keep_best=("loss", "min")) as best:
        for t in (1, 2, 3):
            best.save(t, after(t), metrics={"loss": t if rank == 0 else -t}, wait=True)
        js.mesh.check_same_tree({})  # waits for the other, which removes old ones
        print(best.best_step(), best.steps())

    # Process 0 cannot even begin.
    link = folder.with_name("link")
    if rank == 0:
        link.write_text("")
    try:
        Checkpoints(link, patience=600).save(1, after(1))
        print("no error")
    except CheckpointError as error:
        print("(process 0: " in str(error), error.errno)

impatient = Checkpoints(folder, patience=1)
if rank == 0:
    impatient.save(9, after(9))  # its collective for fingerprints needs both
    try:
        impatient.wait()
    except CheckpointError as error:
        print("has not answered for 1 s" in str(error))
    pathlib.Path(folder, "over").write_text("")
else:
    def late(*_):  # does not say that it is done
        while not (folder / "over").exists():
            time.sleep(0.1)
    _writing.FolderWrite._write_part = late
    impatient.save(9, after(9))
    try:
        impatient.wait()
    except CheckpointError as error:
        print("could not be written" in str(error))
"""


def test_what_fails_on_one_process_fails_on_both_and_both_go_on(tmp_path):
    late = "/nowhere/a\n/nowhere/b\n/nowhere/c\n"
    end = late + "27 True\n27 True\n(1, 4) 4\n5\nTrue\n1 (1, 3)\nTrue 17\nTrue\n"
    assert two_processes(PROGRAM, tmp_path) == [end, end]
    record = json.loads(Path(tmp_path, "run", "4", "record", "metadata").read_text())
    assert record["replicas"] == 2
