"""Two processes of two devices save; they, and one process of any devices, restore."""

import ast
import os
from pathlib import Path

import numpy as np

from checkpoint.runs import MODEL_STATE, PARAMS, checksum_by_replica, make_step
from jaxslowmo.checkpoint import Checkpoints, load_consensus
from support.pairs import two_processes

PROGRAM = """
import shutil, warnings
from pathlib import Path
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxslowmo as js
from checkpoint.runs import MODEL_STATE, PARAMS, batch, checksum_by_replica, make_step
from jaxslowmo.checkpoint import (CheckpointError, Checkpoints, _checkpoints as module,
                                  export_consensus, load_consensus)
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

def unreadable_sixth(path, *rest):
    if path.name == "6":
        raise UnreadableError("a broken cable")
    return read(path, *rest)

if rank == 0:
    Checkpoints(folder).steps()  # one process alone may look
with Checkpoints(folder, keep=9) as checkpoints:
    state = run(step.init(PARAMS, model_state=MODEL_STATE), 1, 5, checkpoints)
    print("UNDISTURBED", checksum_by_replica(state))
    found = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE, step=3)
    print("EXACT", found.is_exact, found.extra)
    print("RESUMED", checksum_by_replica(run(found.state, 4, 5)))
    try:
        checkpoints.restore(step, PARAMS, model_state=MODEL_STATE, step=99)
    except CheckpointError as error:
        print("MISSING", error)
    # What one process cannot read, none of them takes.
    if rank == 0:
        shutil.copytree(folder / "5", folder / "6")
    else:
        module.read_checkpoint = unreadable_sixth
    js.mesh.check_same_tree({})  # waits for the other
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE, fallback=True)
    print("FALLBACK", found.step, *(w.message for w in caught))
    export_consensus(folder / "model", found.state.params, mesh=mesh)
    print("MODEL", load_consensus(folder / "model")["w"].sum())
    # Each replica lies on both processes.
    across = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2).T, ("replica", "fsdp"))
    lies, rows = NamedSharding(across, P("replica", "fsdp")), np.float32([[0, 1], [4, 5]])
    parts = jax.make_array_from_callback(rows.shape, lies, lambda i: rows[i])
    export_consensus(folder / "sharded", parts, mesh=across)
    print("SHARDED", load_consensus(folder / "sharded")["(root)"].tolist())
"""


def test_saved_by_two_processes(mesh_of, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.fspath(Path(__file__).parents[1]), prepend=os.pathsep)
    written: dict[int, int] = {}
    for rank, text in enumerate(two_processes(PROGRAM, tmp_path, devices=2)):
        said = {line.partition(" ")[0]: line.partition(" ")[2] for line in text.splitlines()}
        assert said["EXACT"] == "True {'t': 3}"
        assert said["RESUMED"] == said["UNDISTURBED"]
        assert "step 99" in said["MISSING"]
        assert "1, 2, 3, 4, 5" in said["MISSING"]
        assert said["FALLBACK"].startswith("5 ")
        assert "a broken cable" in said["FALLBACK"]
        assert np.isfinite(float(said["MODEL"]))
        assert said["SHARDED"] == "[2.0, 3.0]"
        own = ast.literal_eval(said["UNDISTURBED"])
        assert list(own) == [2 * rank, 2 * rank + 1]
        written |= own
    checkpoints = Checkpoints(tmp_path / "run")
    step = make_step("slowmo over local_sgd", mesh_of({"replica": 4}))
    found = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE, step=5)
    assert found.is_exact
    assert checksum_by_replica(found.state) == written
    model = load_consensus(tmp_path / "run" / "model")
    mean = np.asarray(found.state.params["w"]).mean(0)
    np.testing.assert_allclose(model["w"], mean, rtol=1e-6, atol=1e-7)
