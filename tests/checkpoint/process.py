"""One of two processes with two devices each. Started by `test_processes.py`."""

import os
import sys
import warnings

import jax

warnings.simplefilter("error")
port, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=300)

import shutil  # noqa: E402
from pathlib import Path  # noqa: E402

from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jaxslowmo as js  # noqa: E402
from checkpoint.runs import MODEL_STATE, PARAMS, batch, checksum_by_replica, make_step  # noqa: E402
from jaxslowmo.checkpoint import (  # noqa: E402
    CheckpointError,
    Checkpoints,
    export_consensus,
    load_consensus,
)
from jaxslowmo.checkpoint import _checkpoints as module  # noqa: E402
from jaxslowmo.checkpoint._folder import UnreadableError  # noqa: E402

read = module.read
mesh = js.make_mesh({"replica": 4})
step = make_step("slowmo over local_sgd", mesh)
split = NamedSharding(mesh, P("replica"))


def run(state, first: int, last: int, checkpoints=None):
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


with Checkpoints(folder, keep=9) as checkpoints:
    state = step.init(PARAMS, model_state=MODEL_STATE)
    state = run(state, 1, 5, checkpoints)
    print("UNDISTURBED", checksum_by_replica(state), flush=True)
    found = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE, step=3)
    print("EXACT", found.is_exact, found.extra, flush=True)
    print("RESUMED", checksum_by_replica(run(found.state, 4, 5)), flush=True)
    try:
        checkpoints.restore(step, PARAMS, model_state=MODEL_STATE, step=99)
    except CheckpointError as error:
        print("MISSING", error, flush=True)
    # What one process cannot read, none of them takes.
    if rank == 0:
        shutil.copytree(Path(folder) / "5", Path(folder) / "6")
    else:
        module.read = unreadable_sixth
    js.check_same_tree({})  # waits for the other
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE, fallback=True)
    print("FALLBACK", found.step, *(w.message for w in caught), flush=True)
    export_consensus(Path(folder) / "model", found.state.params, mesh=mesh)
    print("MODEL", load_consensus(Path(folder) / "model")["w"].sum(), flush=True)
print("DONE", flush=True)
# Whoever leaves first makes the other fail, so both wait until the test has seen both.
sys.stdin.read()
os._exit(0)
