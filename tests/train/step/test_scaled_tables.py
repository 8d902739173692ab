"""Tables and a loss scale: an update that the optimizer skips, tables skip; none goes unseen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.exhaustive import sweep
from train.step.tables import DENSE, batches, embeddings, loss

MEAN = {"gradients": js.all_reduce_gradients("replica")}
WAYS = {"gradients": MEAN, "local_sgd": {"sync": js.local_sgd("replica", sync_every=4)}}


def with_factor(params, batch, *, embedded):
    """An infinite `factor` is in the gradients of rows alone, not of dense parameters."""
    value = loss(params, batch, embedded=embedded)
    return value + jnp.mean(embedded["user"][:, 0] * batch["factor"])


def make(optimizer, **options):
    mesh = js.make_mesh({"replica": 2, "shard": 2}, devices=jax.devices()[:4])
    return js.make_train_step(
        with_factor, optimizer, mesh=mesh, embeddings=embeddings(), donate=False, **options
    )


def given(overflow=()):
    """Batches of 16 examples; in each of `overflow` one of the first replica's is infinite."""
    found = [{**batch, "factor": np.zeros(16, np.float32)} for batch in batches(3)]
    for t in overflow:
        found[t]["factor"][5] = np.inf
    return found


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_close(found, expected, atol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), found, expected)


@pytest.mark.parametrize("name", sweep(WAYS, lambda name: name == "gradients"))
def test_skipped_updates_leave_tables(name):
    way = WAYS[name]
    step = make(js.dynamic_loss_scale(optax.sgd(0.3), initial=1024.0), **way)
    plain = make(optax.sgd(0.3), **way)
    start = step.init(DENSE)
    first, bad, last = given(overflow=[1])
    state, metrics = step(start, first)
    want, _ = plain(plain.init(DENSE), first)
    # Not to the bit: the compiler rounds another program otherwise.
    assert_close(state.params, want.params, 1e-6)
    skipped, metrics = step(state, bad)
    count = [1, 1] if name == "gradients" else [1, 0]
    np.testing.assert_array_equal(metrics["skipped_updates"], count)
    np.testing.assert_array_equal(metrics["loss_scale"], [1024, 1024])
    here = slice(None) if name == "gradients" else slice(1)
    rest = lambda s: jax.tree.map(lambda x: x[here], (s.params, s.opt_state[1].tables))  # noqa: E731
    assert_equal(rest(skipped), rest(state))
    after, _ = step(skipped, last)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after.params, after.opt_state)))


@pytest.mark.exhaustive
def test_late_validation_moves_tables_as_an_early_one():
    """With an overflow in rows alone."""
    found = {}
    for validate in ("before", "after"):
        optimizer = js.dynamic_loss_scale(optax.adam(0.1), initial=16.0)
        step = make(optimizer, validate=validate, **MEAN)
        state = step.init(DENSE)
        for batch in given(overflow=[1]):
            state, metrics = step(state, batch)
        np.testing.assert_array_equal(metrics["skipped_updates"], [1, 1])
        found[validate] = state.params, state.opt_state
    assert_close(*found.values(), atol=1e-5)


@pytest.mark.exhaustive
def test_a_window_of_batches_is_skipped_with_its_rows():
    step = make(js.dynamic_loss_scale(optax.sgd(0.3), initial=1024.0), **MEAN)
    state = step.init(DENSE)
    bad, good, _ = given(overflow=[0])
    window, _ = step.collect(state, bad)
    after, metrics = step(state, good, window=window)
    assert_equal(after.params, state.params)
    np.testing.assert_array_equal(metrics["skipped_updates"], [1, 1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["exact", "patched"])
def test_what_is_asked_ahead_is_of_tables_that_were_skipped(mode):
    step = make(js.dynamic_loss_scale(optax.sgd(0.3), initial=1024.0), **MEAN)
    one, bad, last = given(overflow=[1])
    state, want = step.init(DENSE), step.init(DENSE)
    ahead = step.ahead(mode)
    carry = ahead.prime(state, one)
    for batch, following in ((one, bad), (bad, last), (last, None)):
        state, metrics, carry = ahead(state, batch, carry, following)
        want, _ = step(want, batch)
    np.testing.assert_array_equal(metrics["skipped_updates"], [1, 1])
    assert_equal(state.params, want.params)


def test_vectors_are_cast_and_rows_stay_float32():
    seen = []

    def noting(params, batch, *, embedded):
        seen.extend(x.dtype.name for x in jax.tree.leaves((params, embedded)))
        return with_factor(params, batch, embedded=embedded)

    mesh = js.make_mesh({"replica": 2, "shard": 2}, devices=jax.devices()[:4])
    step = js.make_train_step(
        noting,
        js.dynamic_loss_scale(optax.sgd(0.3), initial=1024.0),
        mesh=mesh,
        embeddings=embeddings(),
        policy=js.Policy("float16"),
        **MEAN,
    )
    state, metrics = step(step.init(DENSE), given()[0])
    assert set(seen) == {"float16"}
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
    assert np.isfinite(metrics["loss"]).all()
    np.testing.assert_array_equal(metrics["skipped_updates"], [0, 0])
