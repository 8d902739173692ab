"""One JAX process that trains the GPT of `text_task`."""

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
import text_task as task  # noqa: E402
from host_turns import Variant, serve  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from machine import describe  # noqa: E402

import jaxslowmo as js  # noqa: E402
from jaxslowmo.models import gpt_loss_fn, gpt_preset, init_gpt  # noqa: E402

R = "replica"
CONFIG = gpt_preset(task.PRESET)
LOSS = gpt_loss_fn(CONFIG)
DATA = dict(np.load(sys.argv[5]))
SEED = int(sys.argv[6])
MESH = js.make_mesh({R: world})
SPLIT = NamedSharding(MESH, P(R))
ONE = jax.make_array_from_process_local_data(SPLIT, np.ones(1, np.float32), (world,))
SUM = jax.jit(jax.shard_map(lambda x: lax.psum(x, R), mesh=MESH, in_specs=P(R), out_specs=P()))
MEAN_LOSS = jax.jit(lambda p, batches: lax.map(lambda b: LOSS(p, b), batches).mean())


def schedule(count):
    return task.LEARNING_RATE * jnp.minimum(1.0, count / task.WARMUP)


def streaming(delay):
    return js.diloco(R, sync_every=48, fragments=4, delay=delay, merge=0.5, shard_state=False)


OPTIONS = {
    # One bucket per few layers, in the order in which the backward pass finishes them; the driver
    # keeps the compiler from merging them.
    "all_reduce": lambda: {
        "gradients": js.all_reduce_gradients(R, bucket_bytes=2**19, first_bucket_bytes=2**19),
    },
    "local_sgd(12)": lambda: {"sync": js.local_sgd(R, sync_every=12)},
    "local_sgd(24)": lambda: {"sync": js.local_sgd(R, sync_every=24)},
    "local_sgd(48)": lambda: {"sync": js.local_sgd(R, sync_every=48)},
    "slowmo(12, 48)": lambda: {
        "sync": js.slowmo(
            R,
            base=js.local_sgd(R, sync_every=12),
            sync_every=48,
            momentum=0.2,
            learning_rate=schedule,
        )
    },
    "diloco(48)": lambda: {"sync": js.diloco(R, sync_every=48)},
    "diloco(48), int8": lambda: {"sync": js.diloco(R, sync_every=48, codec=js.codecs.int8())},
    "diloco(48), int4": lambda: {"sync": js.diloco(R, sync_every=48, codec=js.codecs.int4())},
    "local_sgd(24, delay=6)": lambda: {"sync": js.local_sgd(R, sync_every=24, delay=6, merge=0.5)},
    "local_sgd(48, fragments=4, delay=10)": lambda: {
        "sync": js.local_sgd(R, sync_every=48, fragments=4, delay=10, merge=0.5)
    },
    "diloco(48, fragments=4, delay=3)": lambda: {"sync": streaming(3)},
    "diloco(48, fragments=4, delay=10)": lambda: {"sync": streaming(10)},
}


def meet() -> None:
    SUM(ONE).block_until_ready()


def prepare(name: str):
    b1, b2 = task.BETAS
    adamw = optax.adamw(schedule, b1=b1, b2=b2, weight_decay=task.WEIGHT_DECAY)
    step = js.make_train_step(
        LOSS,
        optax.chain(optax.clip_by_global_norm(task.CLIP), adamw),
        mesh=MESH,
        mode="host",
        **OPTIONS[name](),
    )

    def placed(t: int) -> jax.Array:
        own = task.own_batch(DATA["batches"], t, rank, world)
        return jax.make_array_from_process_local_data(SPLIT, own, (world * len(own), own.shape[1]))

    # Every program is compiled before the clock starts: a whole period on a state of its own.
    state = step.init(init_gpt(CONFIG, SEED))
    for t in range(task.PERIOD):
        state, _ = step(state, placed(t))
    state = step.init(init_gpt(CONFIG, SEED))
    done = 0

    def steps(count: int) -> float:
        nonlocal state, done
        for t in range(done, done + count):
            state, metrics = step(state, placed(t))
        done += count
        jax.block_until_ready(state)
        return float(metrics["loss"].addressable_data(0)[0])

    def evaluate() -> dict:
        """Of the mean over the hosts, outside of the measured time."""
        one = js.consensus(state.params, mesh=MESH, axis_name=R)
        if rank:
            return {}
        one = jax.tree.map(lambda x: x.addressable_data(0), one)
        return {"validation": float(MEAN_LOSS(one, DATA["validation"]))}

    return Variant(steps, evaluate), evaluate()


serve(prepare, meet, describe())
os._exit(0)
