"""One JAX process of the cluster benchmark; the host's part of every step."""

import os
import sys

import jax

address, port, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"{address}:{port}", world, rank, initialization_timeout=120)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import task  # noqa: E402
from host_turns import Variant, serve  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from machine import describe  # noqa: E402

import jaxslowmo as js  # noqa: E402

R = "replica"
MESH = js.make_mesh({R: world})
SPLIT = NamedSharding(MESH, P(R))


def spread(x: np.ndarray) -> jax.Array:
    """This host's rows of an array over all hosts."""
    return jax.make_array_from_process_local_data(SPLIT, x, (world * len(x), *x.shape[1:]))


def loss_fn(params, batch):
    x, y = batch
    for matrix, bias in params[:-1]:
        x = jax.nn.relu(x @ matrix + bias)
    matrix, bias = params[-1]
    return jnp.mean((x @ matrix + bias - y) ** 2)


def delayed_diloco(**options):
    # A sharded anchor would be gathered on top of what was in flight.
    return js.diloco(R, sync_every=48, shard_state=False, **options)


OPTIONS = {
    "no communication": lambda: {"sync": "none"},
    "all_reduce": lambda: {"gradients": js.all_reduce_gradients(R)},
    "all_reduce, apart": lambda: {
        "gradients": js.all_reduce_gradients(R, bucket_bytes=2**20),
    },
    "local_sgd(3)": lambda: {"sync": js.local_sgd(R, sync_every=3)},
    "local_sgd(12)": lambda: {"sync": js.local_sgd(R, sync_every=12)},
    "local_sgd(24)": lambda: {"sync": js.local_sgd(R, sync_every=24)},
    "local_sgd(24, delay=20)": lambda: {"sync": js.local_sgd(R, sync_every=24, delay=20)},
    "local_sgd(48)": lambda: {"sync": js.local_sgd(R, sync_every=48)},
    "local_sgd(48, delay=40)": lambda: {"sync": js.local_sgd(R, sync_every=48, delay=40)},
    "sgp": lambda: {"sync": js.sgp(R)},
    "sgp, overlapped": lambda: {"sync": js.sgp(R, overlap=1)},
    "slowmo(12, 48)": lambda: {
        "sync": js.slowmo(R, base=js.local_sgd(R, sync_every=12), sync_every=48)
    },
    "diloco(48)": lambda: {"sync": js.diloco(R, sync_every=48)},
    "diloco(48, delay=40)": lambda: {"sync": delayed_diloco(delay=40)},
    "diloco(48, fragments=4, delay=8)": lambda: {"sync": delayed_diloco(fragments=4, delay=8)},
    "int8": lambda: {"gradients": js.all_reduce_gradients(R, hook=js.hooks.int8())},
}
BATCH = tuple(spread(x) for x in task.batch(rank))
ONE = spread(np.ones(1, np.float32))
SUM = jax.jit(jax.shard_map(lambda x: lax.psum(x, R), mesh=MESH, in_specs=P(R), out_specs=P()))


def meet() -> None:
    SUM(ONE).block_until_ready()


def prepare(name: str):
    step = js.make_train_step(
        loss_fn,
        optax.sgd(task.LEARNING_RATE, momentum=task.MOMENTUM),
        mesh=MESH,
        mode="host",
        **OPTIONS[name](),
    )
    state = step.init([tuple(jnp.asarray(x) for x in layer) for layer in task.parameters()])

    def steps(count: int) -> float:
        nonlocal state
        for _ in range(count):
            state, metrics = step(state, BATCH)
        jax.block_until_ready(state)
        return float(metrics["loss"].addressable_data(0)[0])

    first = steps(1)
    steps(task.JAX[name] - 1)  # every program is compiled, and the turns begin with a period
    return Variant(steps), {"first_loss": first}


serve(prepare, meet, describe())
os._exit(0)
