"""Two processes of two devices save, fail and restore together; one process restores it, too."""

import ast
import json
import os
from pathlib import Path

import numpy as np

from checkpoint.runs import MODEL_STATE, PARAMS, checksum_by_replica, make_step
from jaxslowmo.checkpoint import Checkpoints, load_consensus
from support.pairs import two_processes

PROGRAM = """
import itertools, resource, shutil, signal, time, warnings
from pathlib import Path
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxslowmo as js
from checkpoint.runs import MODEL_STATE, PARAMS, batch, checksum_by_replica, make_step
from jaxslowmo.checkpoint import (CheckpointError, Checkpoints, _checkpoints as module,
                                  _writing, export_consensus, load_consensus)
from jaxslowmo.checkpoint._record import UnreadableError

warnings.simplefilter("error")
folder, read = Path(__file__).parent / "run", module.read_checkpoint
mesh = js.make_mesh({"replica": 4})
step = make_step("slowmo over local_sgd", mesh)
split = NamedSharding(mesh, P("replica"))

def run(state, first, last, checkpoints=None):
    for t in range(first, last + 1):
        rows = batch(t, 4)
        placed = jax.make_array_from_callback(rows.shape, split, lambda i, rows=rows: rows[i])
        state, _ = step(state, placed)
        if checkpoints is not None:
            checkpoints.save(t, state, extra={"t": t})
    return state

def after(updates):
    return state._replace(step=jax.numpy.full_like(state.step, updates))

def unreadable_sixth(path, *rest):
    if path.name == "6":
        raise UnreadableError("a broken cable")
    return read(path, *rest)

def error_of(call):
    try:
        call()
    except CheckpointError as error:
        return error

def restored(checkpoints, **options):
    return checkpoints.restore(step, PARAMS, model_state=MODEL_STATE, **options)

# Which checkpoints there are is process 0's to say, also to who is late.
time.sleep(0.5 * rank)
error = error_of(lambda: restored(Checkpoints("/nowhere", patience=200)))
print("NOWHERE", str(error).partition(" ")[0])
if rank == 0:
    Checkpoints(folder).steps()  # one process alone may look
with Checkpoints(folder, keep=9, patience=600) as checkpoints:
    state = run(step.init(PARAMS, model_state=MODEL_STATE), 1, 5, checkpoints)
    print("UNDISTURBED", checksum_by_replica(state))
    found = restored(checkpoints, step=3)
    print("EXACT", found.is_exact, found.extra)
    print("RESUMED", checksum_by_replica(run(found.state, 4, 5)))
    print("MISSING", error_of(lambda: restored(checkpoints, step=99)))
    # What one process cannot read, none of them takes.
    if rank == 0:
        shutil.copytree(folder / "5", folder / "6")
    else:
        module.read_checkpoint = unreadable_sixth
    js.mesh.check_same_tree({})  # waits for the other
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = restored(checkpoints, fallback=True)
    print("FALLBACK", found.step, *(w.message for w in caught))
    export_consensus(folder / "model", found.state.params, mesh=mesh)

# Process 1 cannot write; then both go on.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def limit(size):
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

with Checkpoints(folder.with_name("full"), patience=600) as checkpoints:
    limit(100)
    checkpoints.save(2, after(2))
    error = error_of(checkpoints.wait)
    limit(resource.RLIM_INFINITY)  # of what is printed, too
    print("FULL", error.errno, "(process 1: File too large" in str(error))
    checkpoints.save(4, after(4), wait=True)
    print("AGAIN", checkpoints.steps(), restored(checkpoints).step)
    # A file server's client lists what was there a while ago, or nothing that others write.
    kind = type(epath.Path(folder))
    walk, _writing._LISTING_SECONDS = kind.walk, 0.01
    for t, late in ((5, 30), (6, 10**6)):
        def as_it_was(self, seen=itertools.count(), late=late):
            others = rank == 0 and self.name == "state" and next(seen) < late
            return (x for x in walk(self) if not (others and "_1" in str(x[0].relative_to(self))))
        kind.walk = as_it_was
        checkpoints.save(t, after(t))
        print("LISTED", t, "process 1 sees other files" in str(error_of(checkpoints.wait)))
        kind.walk = walk

impatient = Checkpoints(folder, patience=1)
if rank == 0:
    impatient.save(9, after(9))  # its collective for fingerprints needs both
    print("SILENT", "has not answered for 1 s" in str(error_of(impatient.wait)))
    Path(folder, "over").write_text("")
else:
    def late(*_):  # does not say that it is done
        while not (folder / "over").exists():
            time.sleep(0.1)
    _writing.FolderWrite._write_part = late
    impatient.save(9, after(9))
    print("SILENT", "could not be written" in str(error_of(impatient.wait)))
"""


def test_saved_by_two_processes(mesh_of, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.fspath(Path(__file__).parents[1]), prepend=os.pathsep)
    written: dict[int, int] = {}
    for rank, text in enumerate(two_processes(PROGRAM, tmp_path, devices=2)):
        said = {line.partition(" ")[0]: line.partition(" ")[2] for line in text.splitlines()}
        assert said["NOWHERE"] == "/nowhere"
        assert said["EXACT"] == "True {'t': 3}"
        assert said["RESUMED"] == said["UNDISTURBED"]
        assert "step 99" in said["MISSING"]
        assert "1, 2, 3, 4, 5" in said["MISSING"]
        assert said["FALLBACK"].startswith("5 ")
        assert "a broken cable" in said["FALLBACK"]
        assert said["FULL"] == "27 True"
        assert said["AGAIN"] == "(4,) 4"
        assert "LISTED 5 False\nLISTED 6 True\n" in text
        assert said["SILENT"] == "True"
        own = ast.literal_eval(said["UNDISTURBED"])
        assert list(own) == [2 * rank, 2 * rank + 1]
        written |= own
    record = json.loads((tmp_path / "run" / "4" / "record" / "metadata").read_text())
    assert record["replicas"] == 4
    checkpoints = Checkpoints(tmp_path / "run")
    step = make_step("slowmo over local_sgd", mesh_of({"replica": 4}))
    found = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE, step=5)
    assert found.is_exact
    assert checksum_by_replica(found.state) == written
    model = load_consensus(tmp_path / "run" / "model")
    mean = np.asarray(found.state.params["w"]).mean(0)
    np.testing.assert_allclose(model["w"], mean, rtol=1e-6, atol=1e-7)
