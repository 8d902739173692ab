"""Train a small network by every algorithm; write losses and parameters of this process's replicas.

With a process per replica it also prints what its host sends, as JSON.

Arguments: rank, processes, devices per process (0: one device, replicas by vmap), output file.
"""

import json
import sys

import numpy as np
from start import start

REPLICAS, STEPS, BATCH = 4, 12, 6
WIDTHS = (5, 16, 3)

if __name__ == "__main__":
    DEVICES = int(sys.argv[3])
    start(DEVICES or 1)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from sent import bytes_sent  # noqa: E402

import jaxslowmo as js  # noqa: E402

R = "replica"
STEP_OPTIONS = {
    "all_reduce": lambda: {"gradients": js.all_reduce_gradients(R)},
    "slowmo over sgp": lambda: {"sync": js.slowmo(R, base=js.sgp(R), sync_every=4)},
    "slowmo": lambda: {
        "sync": js.slowmo(R, base=js.local_sgd(R, sync_every=2), sync_every=4, shard_state=True)
    },
    "diloco": lambda: {"sync": js.diloco(R, sync_every=5)},
    # With a process per replica these are sent beside the steps.
    "local_sgd, delayed": lambda: {"sync": js.local_sgd(R, sync_every=4, delay=3, merge=0.25)},
    "diloco, in fragments": lambda: {
        "sync": js.diloco(R, sync_every=6, fragments=2, delay=2, shard_state=False)
    },
}
MODES = {"all_reduce": "traced", "slowmo": "traced"}  # of the others "host"


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


def main() -> None:
    mesh = js.make_mesh({R: REPLICAS}) if DEVICES else js.virtual_mesh({R: REPLICAS})
    rng = np.random.default_rng(0)
    first, hidden, last = WIDTHS
    params = {
        "in": rng.normal(size=(first, hidden)).astype(np.float32),
        "out": rng.normal(size=(hidden, last)).astype(np.float32),
    }
    rows = REPLICAS * BATCH
    x, y = (rng.normal(size=(STEPS, rows, n)).astype(np.float32) for n in (first, last))

    def placed(array: np.ndarray):
        if not DEVICES:
            return array
        split = NamedSharding(mesh, P(R))
        return jax.make_array_from_callback(array.shape, split, lambda index: array[index])

    def own(array: jax.Array) -> dict[int, np.ndarray]:
        """By replica, of those that are here."""
        if not DEVICES:
            return dict(enumerate(np.asarray(array)))
        shards = array.addressable_shards
        return {s.index[0].start or 0: np.asarray(s.data)[0] for s in shards}

    found = {}
    for name, options in STEP_OPTIONS.items():
        step = js.make_train_step(
            loss_fn,
            optax.sgd(0.05, momentum=0.9),
            mesh=mesh,
            mode=MODES.get(name, "host"),
            **options(),
        )
        state = step.init(params)
        losses = []
        for t in range(STEPS):
            state, metrics = step(state, (placed(x[t]), placed(y[t])))
            losses.append(own(metrics["loss"]))
        for replica in losses[0]:
            found[f"{name}/{replica}/loss"] = np.stack([one[replica] for one in losses])
        for leaf, value in state.params.items():
            for replica, array in own(value).items():
                found[f"{name}/{replica}/{leaf}"] = array
    np.savez(sys.argv[4], **found)
    if jax.process_count() == REPLICAS:
        print(json.dumps(bytes_sent(mesh)))
    print("devices", jax.local_device_count(), "of", jax.device_count(), flush=True)


if __name__ == "__main__":
    main()
