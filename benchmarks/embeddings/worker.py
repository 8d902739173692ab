"""One JAX process of the embedding benchmark; the host's part of every step."""

import itertools
import os
import sys
from pathlib import Path

import jax

address, port, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"{address}:{port}", world, rank, initialization_timeout=120)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "dlrm"))

import numpy as np  # noqa: E402
import optax  # noqa: E402
import workload  # noqa: E402
from flax import nnx  # noqa: E402
from host_turns import Variant, serve  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from machine import describe  # noqa: E402
from model import DLRM  # noqa: E402

import jaxslowmo as js  # noqa: E402

SHARED = js.make_mesh({"replica": 1, "shard": world})
ALONE = js.make_mesh({"replica": 1, "shard": 1}, devices=jax.local_devices())
BATCHES = workload.batches(rank)
NAMES = [f"t{i}" for i in range(workload.TABLES)]
GRAPHDEF, PARAMS = nnx.split(
    DLRM(
        workload.DENSE,
        workload.TABLES,
        workload.DIM,
        bottom=workload.BOTTOM,
        top=workload.TOP,
        rngs=nnx.Rngs(0),
    )
)
ONE = jax.make_array_from_process_local_data(
    NamedSharding(SHARED, P("shard")), np.ones(1, np.float32), (world,)
)
SUM = jax.jit(
    jax.shard_map(lambda x: lax.psum(x, "shard"), mesh=SHARED, in_specs=P("shard"), out_specs=P())
)


def meet() -> None:
    SUM(ONE).block_until_ready()


def loss_fn(params, batch, *, embedded):
    logits = nnx.merge(GRAPHDEF, params)(batch["dense"], embedded)
    return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean()


def tables(capacity: int | str) -> js.embedding.Embeddings:
    return js.embeddings(
        {name: js.Table(workload.ROWS, workload.DIM) for name in NAMES},
        axis_name="shard",
        capacity=capacity,
        optimizer=js.rowwise_adagrad(workload.LEARNING_RATE),
        inputs=ids_of,
    )


def ids_of(batch):
    return {name: batch[name] for name in NAMES}


def slots_needed() -> int:
    """Of each owner and table, by any host."""
    shared = tables("auto").over(SHARED)
    every = (batch for host in range(world) for batch in workload.batches(host))
    return max(max(shared.slots_needed(ids_of(batch)).values()) for batch in every)


CAPACITY = slots_needed()


def prepare(name: str):
    alone = name == "compute alone"
    step = js.make_train_step(
        loss_fn,
        optax.adam(workload.LEARNING_RATE),
        mesh=ALONE if alone else SHARED,
        embeddings=tables("auto" if alone else CAPACITY),
    )
    ahead = {} if name in ("compute alone", "unpipelined") else {"mode": name, "depth": 2}
    pipeline = js.TrainPipeline(
        step,
        step.init(PARAMS),
        itertools.cycle(BATCHES),
        **{"depth": 0, **ahead},
    )
    seen = {}

    def steps(count: int) -> float:
        result = None
        for _ in range(count):
            result = next(pipeline)
        jax.block_until_ready(pipeline.state)
        assert result is not None
        # Equal on all hosts; of the one replica.
        seen.update({k: float(np.mean(v.addressable_data(0))) for k, v in result.metrics.items()})
        return seen["loss"]

    first = steps(1)
    steps(workload.STEPS[name])  # every program is compiled
    return Variant(steps, lambda: dict(seen)), {"first_loss": first}


serve(prepare, meet, describe() | {"capacity": CAPACITY})
os._exit(0)
