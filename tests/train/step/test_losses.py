"""A loss means the same wherever a step runs it: averaged by itself, with loops, in stages, ...

By hand it is plain jax on the whole batch of each replica, without any mesh.
"""

import functools
import itertools

import flax.linen as nn
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
from support.exhaustive import sweep
from train.step import tables
from train.step.problem import BATCHES, KINDS, PARAMS, covering

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


def from_zeros(params, x):
    part = x.reshape(2, -1, x.shape[1])
    add = lambda i, total: total + mean(params, part[i])  # noqa: E731
    return lax.fori_loop(0, 2, add, jnp.zeros(())) / 2


def with_a_constant_branch(params, x):
    return lax.cond(jnp.sum(x) > 0, lambda: mean(params, x), lambda: jnp.float32(1.0))


@jax.custom_vjp
def half_seen(x):
    return x, x


half_seen.defvjp(lambda x: (half_seen(x), x.shape), lambda shape, g: (g[0] + jnp.zeros(shape),))


def with_zeros_as_a_cotangent(params, x):
    seen, unseen = half_seen(scores(params, x))
    return seen.mean() + 0 * lax.stop_gradient(unseen).sum()


def recurrent(params, x):
    cell = {"i": {"kernel": params["w"], "bias": params["b"]}, "h": {"kernel": params["w"][:3]}}
    rnn = nn.RNN(nn.SimpleCell(3))
    steps = jnp.stack([x, 0.5 * x, -x], 1)
    return jnp.mean(rnn.apply({"params": {"cell": cell}}, steps) ** 2)


def ctc(params, x):
    logits = x[:, :, None] * params["w"][None] + params["b"][None, None]
    labels = jnp.tile(jnp.array([1, 2]), (len(x), 1))
    return optax.ctc_loss(
        logits, jnp.zeros(logits.shape[:2]), labels, jnp.zeros((len(x), 2))
    ).mean()


@jax.custom_jvp
def doubled(x):
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


def by_pallas(params, x):
    return doubled(scores(params, x)).mean()


LOSSES = [
    *(mean, of_itself, total_by_count, in_chunks, from_zeros, with_a_constant_branch),
    *(with_zeros_as_a_cotangent, recurrent, ctc, by_pallas),
]
OPTIONS = {
    "loss": LOSSES,
    "where": ["auto", "virtual", "explicit", "auto device", "virtual device", "auto fsdp"],
    "how": ["step", "accumulate", "window"],
    "algorithm": ["all_reduce", "local_sgd", "diloco", "sgp"],
    "mode": ["traced", "host"],
}
RUNS = 10
SYNC = {
    "all_reduce": None,
    "local_sgd": js.local_sgd("replica", sync_every=2),
    "diloco": js.diloco("replica", sync_every=2, outer_optimizer=optax.sgd(1.0)),
    "sgp": js.sgp("replica"),
}
EXCHANGES = {"local_sgd": 2, "diloco": 2, "sgp": 1}  # plain averages, with two replicas
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
        if t % EXCHANGES.get(algorithm, UPDATES + 1) == 0:
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
    step = js.make_train_step(
        loss,
        optax.sgd(RATE),
        gradients=js.all_reduce_gradients("replica") if algorithm == "all_reduce" else None,
        sync=SYNC[algorithm],
        mesh=mesh,
        mode=run["mode"],
        accumulate=2 if run["how"] == "accumulate" else 1,
    )
    params = PARAMS
    if inner == ["device"] and algorithm == "all_reduce":
        step = js.make_train_step(
            loss,
            optax.sgd(RATE),
            gradients=js.all_reduce_gradients(("replica", "device")),
            mesh=mesh,
        )
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
        if loss is not with_a_constant_branch:  # it chooses by the sum of what it is given
            np.testing.assert_allclose(
                [np.mean(x) for x in found], value, rtol=1e-5, err_msg=str(run)
            )
        for name in PARAMS:
            each = [p[name] for p in after]
            if loss is with_a_constant_branch and (run["how"] != "step" or inner == ["device"]):
                assert np.isfinite(state.params[name]).all()
                continue
            np.testing.assert_allclose(
                state.params[name], each, rtol=1e-5, atol=1e-6, err_msg=str(run)
            )


def with_tables(params, batch, *, embedded):
    """`tables.loss` by a loop from zeros, averaged over all devices by itself."""
    both = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), (batch, embedded))

    def add(total, part):
        batch, embedded = part
        return total + tables.loss(params, batch, embedded=embedded), None

    return lax.pmean(lax.scan(add, 0.0, both)[0] / 2, ("replica", "shard"))


def test_with_tables():
    """Compare with the same loss without loops and averages."""
    ends, mean = [], js.all_reduce_gradients(("replica", "shard"))
    for loss in (with_tables, tables.loss):
        step = tables.step_of(2, loss_fn=loss, accumulate=2, gradients=mean)
        state = step.init(tables.DENSE)
        for batch in tables.batches(3):
            state, _ = step(state, batch)
        ends.append({**state.params.dense, **tables.whole(step, state)})
    for name, x in ends[1].items():
        np.testing.assert_allclose(ends[0][name], x, rtol=1e-5, atol=1e-6, err_msg=name)


def layer(params, x):
    return jnp.tanh(x @ params["w"])


def looped_layer(params, x):
    """The same by a loop from zeros."""
    add = lambda total, both: (total + jnp.outer(both[0], both[1]), None)  # noqa: E731
    return jnp.tanh(lax.scan(add, jnp.zeros(x.shape), (x.T, params["w"]))[0])


def at_the_end(x, batch):
    return jnp.mean((x - batch) ** 2)


def averaged_at_the_end(x, batch):
    return lax.pmean(at_the_end(x, batch), "replica")


@pytest.mark.parametrize("executor", ["one_program", "host"])
def test_in_stages(executor):
    mesh, ends = js.make_mesh({"replica": 2, "stage": 2}), []
    params = [
        {"w": PARAMS["w"][:, :1] * np.ones(8, np.float32) + np.float32(0.1 * i)} for i in range(2)
    ]
    for layers, loss in (([layer] * 2, at_the_end), ([looped_layer] * 2, averaged_at_the_end)):
        model = js.LayeredModel(layers, loss)
        pipe = js.pipelined(model, params, js.schedules.gpipe(2, 2), mesh=mesh, executor=executor)
        step = js.make_train_step(pipe, optax.sgd(RATE), sync=SYNC["local_sgd"], mesh=mesh)
        state = step.init(params)
        for batch in GIVEN[:3]:
            evaluated = step.evaluate(state, batch)["loss"]
            state, metrics = step(state, batch)
            np.testing.assert_allclose(metrics["loss"], evaluated, rtol=1e-5)
        ends.append((np.mean(metrics["loss"]), step.consensus(state)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), *ends)


@pytest.mark.parametrize("kind", ["plain", "one_program", "host"])
def test_a_number_of_python_is_a_float32_loss(kind):
    """It is one where jax counts in float64, too."""
    params = [{"w": np.eye(8, dtype=np.float32)}] * 2
    with jax.enable_x64(True):
        if kind == "plain":
            mesh, fn = js.make_mesh({"replica": 2}), lambda params, batch: 0.5
        else:
            mesh, layer = js.make_mesh({"replica": 2, "stage": 2}), lambda own, x: x @ own["w"]
            model = js.LayeredModel([layer] * 2, lambda y, batch: 0.5)
            schedule = js.schedules.gpipe(2, 2)
            fn = js.pipelined(model, params, schedule, mesh=mesh, executor=kind)
        step = js.make_train_step(fn, optax.sgd(RATE), sync="none", mesh=mesh)
        _, metrics = step(step.init(params), np.ones((8, 8), np.float32))
    assert (metrics["loss"].dtype, metrics["loss"].tolist()) == (np.float32, [0.5, 0.5])
