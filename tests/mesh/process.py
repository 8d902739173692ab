"""One of two processes, whose parameter trees may differ. Started by `test_same_tree.py`."""

import os
import sys

import jax

port, rank, entry, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=300)

import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jaxslowmo as js  # noqa: E402

mesh = js.make_mesh({"replica": 2})
split = NamedSharding(mesh, P("replica"))
params = {"w": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
if kind == "differ" and rank == 1:
    params = {"w": np.ones(3, np.float32), "b": np.ones(4, np.float32), "c": params["b"]}
try:
    if entry == "init":
        own = jax.local_devices()[0]
        stacked = {
            name: jax.make_array_from_single_device_arrays(
                (2, *x.shape), split, [jax.device_put(x[None], own)]
            )
            for name, x in params.items()
        }
        state = js.init(js.local_sgd("replica"), stacked, mesh=mesh, axis_name="replica")
        print("COUNT", np.asarray(state.count.addressable_data(0)), flush=True)
    else:
        step = js.make_train_step(
            lambda p, batch: ((batch @ p["w"]) ** 2).mean() + p["b"].sum(),
            optax.sgd(0.1),
            sync=js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4),
            mesh=mesh,
            mode="host",
        )
        state = step.init(params)
        print("IN_SYNC", js.check_in_sync(state.params, mesh=mesh), flush=True)
        mine = params["w"] + np.array([0, rank / 2, 0], np.float32)
        apart = jax.make_array_from_process_local_data(split, mine[None], (2, 3))
        try:
            js.check_in_sync({**state.params, "w": apart}, mesh=mesh)
        except js.OutOfSyncError as error:
            print("OUT_OF_SYNC", error, flush=True)
        rows = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
        mine = rows[rank * 4 : rank * 4 + 4]
        batch = jax.make_array_from_process_local_data(split, mine, (8, 3))
        for _ in range(4):
            state, _ = step(state, batch)
        one = js.consensus(state.params, mesh=mesh, axis_name="replica")
        print("PARAMS", np.asarray(one["w"].addressable_data(0)).tolist(), flush=True)
        # Process 0 has two batches, process 1 only one.
        average = js.all_reduce_gradients("replica", divide_by="active")
        step = js.make_train_step(
            lambda p, batch: ((batch @ p["w"]) ** 2).mean(),
            optax.sgd(0.1),
            gradients=average,
            mesh=mesh,
        )
        share = [rows[rank * 4 : rank * 4 + 4], rows[:4]][: 2 - rank]
        state = step.init(params)
        for batch, weight in js.uneven_batches([share], mesh=mesh):
            state, _ = step(state, batch, weight)
        print("UNEVEN", np.asarray(state.params["w"].addressable_data(0))[0].tolist(), flush=True)
        state = None  # an odd shape on one process is an error on both
        try:
            list(js.uneven_batches([[rows[:4], rows[: 4 - rank]]], mesh=mesh))
        except ValueError as error:
            print("ODD", error, flush=True)
except ValueError as error:
    print("VALUE_ERROR", error, flush=True)
print("DONE", flush=True)
# Whoever leaves first makes the other fail, so both wait until the test has seen both.
sys.stdin.read()
os._exit(0)
