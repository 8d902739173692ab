"""Small training steps whose states are saved, and functions that compare states."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxslowmo as js

# `w` is large enough to be stored in its own file.
PARAMS = {
    "b": np.zeros(40, jax.numpy.bfloat16),
    "w": np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32),
}
MODEL_STATE = {"mean": np.zeros(40, np.float32), "seen": np.zeros((), np.int32)}
PERIOD = 4

SYNCS: dict[str, Callable[[], js.ParameterTransform | None]] = {
    "all_reduce": lambda: None,
    "local_sgd": lambda: js.local_sgd("replica", sync_every=PERIOD),
    "slowmo over local_sgd": lambda: js.slowmo(
        "replica", base=js.local_sgd("replica", sync_every=2), sync_every=PERIOD
    ),
    "slowmo over sgp": lambda: js.slowmo(
        "replica", base=js.sgp("replica", overlap=2), sync_every=PERIOD
    ),
    "noloco": lambda: js.noloco("replica", sync_every=2, graph=js.topology.ring),
    "diloco": lambda: js.diloco("replica", sync_every=PERIOD, outer_optimizer=optax.adam(0.1)),
}


def loss(params: Any, batch: jax.Array, *, rng: jax.Array, model_state: Any):
    y = batch @ params["w"] + params["b"][None].astype("float32")
    y += 0.01 * jax.random.normal(rng, y.shape)
    state = {"mean": 0.9 * model_state["mean"] + y.mean(0), "seen": model_state["seen"] + 1}
    return (y**2).mean(), ({}, state)


def make_step(
    name: str,
    mesh: Any,
    *,
    mode: Any = "host",
    sync: js.ParameterTransform | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> js.train.TrainStep:
    """A step on a mesh, or on so many virtual replicas."""
    reduced = js.all_reduce_gradients("replica", hook=js.hooks.int8(error_feedback=True))
    return js.make_train_step(
        loss,
        optimizer or optax.adamw(1e-2),
        sync=sync or SYNCS[name](),
        gradients=reduced if name == "all_reduce" else None,
        mesh=js.virtual_mesh({"replica": mesh}) if isinstance(mesh, int) else mesh,
        mode=mode,
        model_state="local",
    )


def after(state: js.TrainState, updates: int) -> js.TrainState:
    """The state as if it had done so many updates."""
    return state._replace(step=jax.numpy.full_like(state.step, updates))


def batch(t: int, replicas: int) -> np.ndarray:
    return np.random.default_rng(t).normal(size=(replicas * 2, 5)).astype(np.float32)


def trained(step: js.train.TrainStep, state: js.TrainState, first: int, last: int) -> js.TrainState:
    """The state after the updates from `first` on and before `last`."""
    for t in range(first, last):
        state, _ = step(state, batch(t, len(state.step)))
    return state


def on_host(state: Any) -> Any:
    """Return the state as NumPy arrays, with the data of PRNG keys in place of keys."""

    def host(x: jax.Array) -> np.ndarray:
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(host, state)


def leaf_bytes(state: Any) -> list[bytes]:
    """Return the bytes of all leaves, equal for states that are equal bit by bit."""
    return [x.tobytes() for x in jax.tree.leaves(on_host(state))]


def checksum_by_replica(state: Any) -> dict[int, int]:
    """Return a checksum of what the devices of each replica of this process hold."""
    sums: dict[int, int] = {}
    replicas = {x.device: x.index[0].start or 0 for x in state.step.addressable_shards}
    for x in jax.tree.leaves(state):
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        for shard in (jax.random.key_data(x) if is_key else x).addressable_shards:
            replica = replicas[shard.device]
            data = np.ascontiguousarray(shard.data).tobytes()
            sums[replica] = zlib.crc32(data, sums.get(replica, 0))
    return dict(sorted(sums.items()))


def rewrite_record(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the record of a checkpoint, and its checksum with it."""
    path = checkpoint / "record" / "metadata"
    value = json.loads(path.read_text())
    change(value)
    content = {k: v for k, v in value.items() if k not in ("jaxslowmo_checkpoint", "crc32")}
    value["crc32"] = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    path.write_text(json.dumps(value))
