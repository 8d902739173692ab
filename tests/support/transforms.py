"""Every public transform, and parameters to run it on."""

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.easgd import easgd


def slowmo_over_local(**options):
    base = js.local_sgd("replica", sync_every=2)
    return js.slowmo("replica", base=base, sync_every=4, momentum=0.5, **options)


def pairs(**options):
    graph = js.topology.random_matching(4)
    return js.noloco("replica", sync_every=2, graph=graph, **options)


BFLOAT16 = js.codecs.bfloat16(error_feedback=True)
FLOAT16 = js.codecs.float16(error_feedback=True)
IRREGULAR = js.topology.from_phone_book([[1, 3], [0, 2], [0, 3], [1, 0]])

TRANSFORMS = {
    "clip_by_global_norm": lambda: js.clip_by_global_norm(0.5, "replica", param_specs=P("replica")),
    "all_reduce_gradients": lambda: js.all_reduce_gradients("replica", bucket_bytes=16),
    "all_reduce_gradients merged": lambda: js.all_reduce_gradients(
        "replica", bucket_bytes=8, split_large=True, max_buckets=3
    ),
    "all_reduce_gradients int8": lambda: js.all_reduce_gradients(
        "replica", hook=js.hooks.int8(block_size=4, stochastic_rounding=True)
    ),
    "all_reduce_gradients top_k": lambda: js.all_reduce_gradients(
        "replica", hook=js.hooks.top_k(0.2)
    ),
    "all_reduce_gradients powersgd": lambda: js.all_reduce_gradients(
        "replica", hook=js.hooks.powersgd(1, 2, min_compression_rate=0.1)
    ),
    "demo": lambda: js.demo("replica", compression_decay=0.9, top_k=2, chunk=3),
    "accumulate": lambda: js.gradients.accumulate(js.all_reduce_gradients("replica"), every=2),
    "hierarchical_local_sgd": lambda: js.hierarchical_local_sgd({"replica": 2}),
    "all_reduce_rows": lambda: js.sparse.all_reduce_rows(
        "replica", dense=js.all_reduce_gradients("replica")
    ),
    "local_sgd": lambda: js.local_sgd("replica", sync_every=2),
    "local_sgd scheduled": lambda: js.local_sgd(
        "replica", sync_every=js.every(3, start=1, before="all"), bucket_bytes=8
    ),
    "local_sgd in 4 bits": lambda: js.local_sgd("replica", sync_every=2, codec=js.codecs.int4()),
    "easgd": lambda: easgd("replica", sync_every=2),
    "only_finite": lambda: js.only_finite(js.local_sgd("replica", sync_every=2)),
    "only_finite around slowmo": lambda: js.only_finite(slowmo_over_local()),
    "slowmo over only_finite": lambda: js.slowmo(
        "replica", base=js.only_finite(js.local_sgd("replica", sync_every=2)), sync_every=4
    ),
    "noloco": lambda: pairs(),
    "noloco with a pull": lambda: pairs(pull=0.9, bucket_bytes=8),
    "sgp": lambda: js.sgp("replica", graph=IRREGULAR),
    "sgp late": lambda: js.sgp("replica", graph=IRREGULAR, overlap=1, bucket_bytes=8),
    "sgp in 16 bits": lambda: js.sgp("replica", graph=IRREGULAR, overlap=2, codec=BFLOAT16),
    "sgp on one round": lambda: js.sgp("replica", graph=js.topology.ring(4)),
    "sparta": lambda: js.sparta("replica", share=0.3, sync_every=2),
    "slowmo over sparta": lambda: js.slowmo(
        "replica", base=js.sparta("replica", share=0.3), sync_every=4
    ),
    "skip_unused": lambda: js.gradients.skip_unused(
        optax.chain(js.all_reduce_gradients("replica"), optax.sgd(0.1, momentum=0.9)), "replica"
    ),
    "slowmo": lambda: slowmo_over_local(learning_rate=optax.linear_schedule(0.1, 0.0, 4)),
    "slowmo whole": lambda: slowmo_over_local(shard_state=False),
    "slowmo inexact": lambda: slowmo_over_local(exact_average=False),
    "slowmo over sgp": lambda: js.slowmo(
        "replica", base=js.sgp("replica", graph=IRREGULAR, overlap=2), sync_every=4
    ),
    "diloco": lambda: js.diloco("replica", sync_every=2),
    "diloco rda": lambda: js.diloco("replica", sync_every=2, aggregate="rda"),
    "diloco by norms": lambda: js.diloco(
        "replica", sync_every=2, aggregate=js.norm_weighted(damping=0.5)
    ),
    "dynamic_loss_scale": lambda: js.dynamic_loss_scale(
        optax.chain(js.all_reduce_gradients("replica"), optax.sgd(0.1, momentum=0.9)),
        initial=2.0,
        growth_interval=2,
    ),
    "diloco adam": lambda: js.diloco(
        "replica", sync_every=2, outer_optimizer=optax.adam(0.1), shard_state=False
    ),
    "slow_momentum": lambda: js.slow_momentum(),
    "sum_tied_gradients": lambda: js.pipeline.sum_tied_gradients(
        "replica",
        [{0: "layer/a", 3: "layer/a"}, {0: "layer/half", 1: "layer/half", 2: "layer/half"}],
    ),
}
PARAMETER = [name for name, make in TRANSFORMS.items() if isinstance(make(), js.ParameterTransform)]
SIZES = {"a": (3, 5), "empty": (0, 2), "half": (5,), "scalar": (), "short": (7,)}
DTYPES = {"half": jnp.bfloat16, "short": jnp.float16}


def stacked(replicas: int = 4, scale: float = 1.0) -> dict:
    """Return parameters with a leading axis of replicas and leaves of all kinds."""
    rng = np.random.default_rng(0)
    return {
        "layer": {
            name: jnp.asarray(
                scale * rng.normal(size=(replicas, *shape)), DTYPES.get(name, "float32")
            )
            for name, shape in SIZES.items()
        },
        "none": {},
    }
