"""A loss means the same wherever a step runs it: averaged by itself, with loops, in stages, ...

By hand it is plain jax on the whole batch of each replica, without any mesh.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.exhaustive import covering, sweep
from train.step.problem import BATCHES, KINDS, PARAMS

REPLICAS, RATE, UPDATES = 2, 0.2, 4
# Axes of the mesh over which a loss averages; none by hand.
AXES: list[str] = []


def scores(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"] + params["b"][None]) ** 2, axis=1)


def mean(params, x):
    return scores(params, x).mean()


def of_itself(params, x):
    return lax.pmean(mean(params, x), AXES) if AXES else mean(params, x)


def total_by_count(params, x):
    both = scores(params, x).sum(), jnp.float32(len(x))
    total, count = lax.psum(both, AXES) if AXES else both
    return total / count


def in_chunks(params, x):
    """The carry starts from numbers."""

    def add(carry, part):
        return (carry[0] + scores(params, part).sum(), carry[1] + len(part)), None

    total, count = lax.scan(add, (0.0, 0), x.reshape(2, -1, x.shape[1]))[0]
    return total / count


def with_a_constant_branch(params, x):
    return lax.cond(jnp.sum(params["w"]) < 99, lambda: mean(params, x), lambda: jnp.float32(1.0))


@jax.custom_jvp
def doubled(x):
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


def by_pallas(params, x):
    return doubled(scores(params, x)).mean()


LOSSES = [mean, of_itself, total_by_count, in_chunks, with_a_constant_branch, by_pallas]
OPTIONS = {
    "loss": LOSSES,
    "where": ["auto", "virtual", "explicit", "auto device", "virtual device", "auto fsdp"],
    "how": ["step", "accumulate", "window"],
    "algorithm": ["all_reduce", "local_sgd", "diloco"],
    "mode": ["traced", "host"],
}
RUNS = 6
SYNC = {
    "all_reduce": None,
    "local_sgd": js.local_sgd("replica", sync_every=2),
    "diloco": js.diloco("replica", sync_every=2, outer_optimizer=optax.sgd(1.0)),
}
GIVEN = BATCHES[:UPDATES, :16]


def average(trees):
    return [jax.tree.map(lambda *x: sum(x) / REPLICAS, *trees)] * REPLICAS


@functools.cache
def by_hand(loss, algorithm):
    """Yield the losses before, and the parameters after each update."""
    AXES.clear()
    differentiate = jax.jit(jax.value_and_grad(loss))
    params, history = [PARAMS] * REPLICAS, []
    for t, batch in enumerate(GIVEN, 1):
        results = [differentiate(*x) for x in zip(params, np.split(batch, REPLICAS), strict=True)]
        grads = [g for _, g in results]
        if algorithm == "all_reduce":
            grads = average(grads)
        params = [
            jax.tree.map(lambda p, g: p - RATE * g, *both)
            for both in zip(params, grads, strict=True)
        ]
        if algorithm != "all_reduce" and t % 2 == 0:  # plain averages
            params = average(params)
        history.append((np.mean([v for v, _ in results]), params))
    return history


@pytest.mark.filterwarnings("ignore:`sync` keeps shards")  # diloco, over "fsdp"
@pytest.mark.parametrize(
    ("seed", "number"), sweep(itertools.product(range(8), range(RUNS)), lambda seed, _: seed == 0)
)
def test_a_loss_trains_as_on_the_whole_batch(seed, number):
    run = covering(OPTIONS, RUNS, seed)[number]
    loss, algorithm, (kind, *inner) = run["loss"], run["algorithm"], run["where"].split()
    wanted = by_hand(loss, algorithm)
    mesh = KINDS[kind]({"replica": REPLICAS, **dict.fromkeys(inner, 2)})
    AXES[:] = ["replica", *(a for a in inner if a == "device")]
    axes = ("replica",) * (algorithm == "all_reduce") + ("device",) * (inner == ["device"])
    step = js.make_train_step(
        loss,
        optax.sgd(RATE),
        gradients=js.all_reduce_gradients(axes) if axes else None,
        sync=SYNC[algorithm],
        mesh=mesh,
        mode=run["mode"],
        accumulate=2 if run["how"] == "accumulate" else 1,
    )
    params = PARAMS
    if inner == ["fsdp"]:
        params = PARAMS | {"w": jax.device_put(PARAMS["w"], NamedSharding(mesh, P("fsdp")))}
    state = step.init(params)
    for batch, (value, after) in zip(GIVEN, wanted, strict=True):
        found = [step.evaluate(state, batch)["loss"]]
        if run["how"] == "window":
            halves = np.stack(np.split(batch, REPLICAS)).reshape(REPLICAS, 2, -1, 8)
            first, last = np.moveaxis(halves, 1, 0).reshape(2, -1, 8)
            window, _ = step.collect(state, first)
            state, _ = step(state, last, window=window)
        else:
            state, metrics = step(state, batch)
            found.append(metrics["loss"])
        np.testing.assert_allclose([np.mean(x) for x in found], value, rtol=1e-5, err_msg=str(run))
        for name in PARAMS:
            each = [p[name] for p in after]
            np.testing.assert_allclose(
                state.params[name], each, rtol=1e-5, atol=1e-6, err_msg=str(run)
            )
