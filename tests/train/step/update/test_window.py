"""Gradients of several batches as one update, against one batch of them all and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.step.problem import PARAMS

RNG = np.random.default_rng(3)
REPLICAS, ROWS = 4, 4
BATCHES = RNG.normal(size=(7, REPLICAS * ROWS, 8)).astype(np.float32)
STATISTICS = {"mean": np.zeros(8, np.float32), "n": np.int32(0), "keys": jax.random.key(3)}
ONE, INNER = {"replica": REPLICAS}, {"replica": REPLICAS, "device": 2}
VIRTUAL, average = js.virtual_mesh(ONE), js.all_reduce_gradients("replica")


def loss(params, batch, *, rng, model_state):
    """Dropout by the batch's key and by a stream in the state, and statistics that drift."""
    streams, own = jax.random.split(model_state["keys"])
    noise = jax.random.bernoulli(rng, 0.5, batch.shape) + jax.random.normal(own, batch.shape) / 4
    new = {
        "mean": 0.9 * model_state["mean"] + 0.1 * batch.mean(0),
        "n": model_state["n"] + 1,
        "keys": streams,
    }
    out = jnp.tanh((batch * noise - new["mean"]) @ params["w"] + params["b"])
    value = jnp.mean(out**2)
    return value, ({"largest": jnp.max(jnp.abs(out))}, new)


def plain(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2)


def made(mesh=VIRTUAL, **options):
    options = {"gradients": None, "sync": js.local_sgd("replica", sync_every=2), **options}
    return js.make_train_step(loss, optax.sgd(0.3, momentum=0.9), mesh=mesh, **options)


def begin(step):
    return step.init(PARAMS, model_state=STATISTICS)


def joined(batches, parts):
    """Return batches as one, whose microbatches on every device they are."""
    cut = [np.split(batch, parts) for batch in batches]
    return np.concatenate([part for device in zip(*cut, strict=True) for part in device])


def windowed(step, state, batches, weights=None):
    """Make one update of several batches."""
    window, seen = None, []
    weights = [None] * len(batches) if weights is None else weights
    for batch, weight in zip(batches[:-1], weights[:-1], strict=True):
        window, metrics = step.collect(state, batch, weight, window=window)
        seen.append(metrics)
    state, metrics = step(state, batches[-1], weights[-1], window=window)
    return state, [*seen, metrics]


def comparable(tree):
    keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if keys(x) else x), tree)


def assert_same(found, expected):
    found, expected = map(comparable, (found, expected))
    close = {"rtol": 1e-6, "atol": 1e-6}
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, **close), found, expected)


def means(metrics):
    return jax.tree.map(lambda *x: np.mean(x, axis=0), *metrics)


def test_batches_are_the_microbatches_of_one():
    """With model state, keys and momentum; over two updates, the second of which exchanges.

    A window that is applied is the update with its last batch.
    """
    mesh = js.make_mesh(INNER)
    step, whole, applied = made(mesh), made(mesh, accumulate=3), made(mesh)
    state, reference, other = map(begin, (step, whole, applied))
    for batches in BATCHES[:3], BATCHES[3:6]:
        state, seen = windowed(step, state, batches)
        parts = REPLICAS * mesh.shape.get("device", 1)
        reference, metrics = whole(reference, joined(batches, parts))
        assert_same(means(seen), metrics)
        window = None
        for batch in batches:
            window, _ = applied.collect(other, batch, window=window)
        other, metrics = applied.apply(other, window)
        assert_same(means(seen), metrics)
    assert_same(state, reference)
    assert_same(other, reference)


def sent_by(fn, *arguments):
    """(axis, collective, count, bytes) of what a function sends."""
    rows = js.comm_report(fn, *arguments).select(level="emitted")
    return {(row.axis, row.collective, row.count, row.bytes) for row in rows}


@pytest.mark.parametrize("axes", [ONE, INNER])
def test_a_window_is_reduced_once(axes):
    """As `js.comm_report` tells: nothing between replicas in a batch that is only collected."""
    size, gradients = sum(x.nbytes for x in jax.tree.leaves(PARAMS)), tuple(axes)
    step = js.make_train_step(
        plain,
        optax.sgd(0.1),
        gradients=js.all_reduce_gradients(gradients),
        mesh=js.make_mesh(axes),
    )
    state = step.init(PARAMS)
    window, _ = step.collect(state, BATCHES[0])
    collected = sent_by(step.collect, state, BATCHES[0])
    updated = {(",".join(axes), "all-reduce", 1, size)}
    assert collected == ({("device", "all-reduce", 1, 4)} if "device" in axes else set())
    assert sent_by(step.apply, state, window) == updated
    last = sent_by(lambda s, b, w: step(s, b, window=w), state, BATCHES[0], window)
    assert last == collected | updated


@pytest.mark.parametrize("donate", [True, False])
def test_a_window_is_used_up(donate):
    """Its gradients are let go of where the step donates, and stay where it does not."""
    options = {"gradients": average, "mesh": VIRTUAL, "donate": donate}
    step = js.make_train_step(plain, optax.sgd(0.1), **options)
    state = step.init(PARAMS)
    first, _ = step.collect(state, BATCHES[0])
    window, _ = step.collect(state, BATCHES[1], window=first)
    assert np.all(np.asarray(window.count) == 2)
    step.apply(state, window)
    for used in (first, window):
        assert all(x.is_deleted() == donate for x in jax.tree.leaves(used.totals))
        if donate:
            with pytest.raises(ValueError, match="`window`"):
                step.apply(step.init(PARAMS), used)
