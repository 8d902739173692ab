"""Optimizers of which nothing is known are tried, and SAM is told from the schedule."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

PARAMS = {"w": np.ones((7, 5), np.float32), "b": np.ones(5, np.float32)}
MESH = js.virtual_mesh({"replica": 2})


class Sums(NamedTuple):
    start: Any
    total: Any


class Told(NamedTuple):
    start: Any
    total: Any


class Anchored(NamedTuple):
    origin: Any
    seen: Any


class Decay(NamedTuple):
    seen: Any


js.remembers_parameters(Told, moves=("start",))
js.remembers_parameters(Anchored, stays=("origin",))


def dual_averaging(kind):
    """Every new value from the first one and the sum of gradients."""

    def update(grads, state, params=None):
        total = jax.tree.map(jnp.add, state.total, grads)
        updates = jax.tree.map(lambda s, g, p: s - 0.1 * g - p, state.start, total, params)
        return updates, kind(state.start, total)

    return optax.GradientTransformation(lambda p: kind(p, jax.tree.map(jnp.zeros_like, p)), update)


def pulled(strength):
    """A decay of its own."""

    def update(grads, state, params=None):
        updates = jax.tree.map(lambda g, p: -0.1 * g - strength * p, grads, params)
        return updates, Decay(jax.tree.map(jnp.add, state.seen, grads))

    return optax.GradientTransformation(lambda p: Decay(jax.tree.map(jnp.zeros_like, p)), update)


def anchored():
    """Pulled back to where all replicas began."""

    def update(grads, state, params=None):
        updates = jax.tree.map(lambda g, p, o: 0.2 * (o - p) - g, grads, params, state.origin)
        return updates, state

    return optax.GradientTransformation(lambda p: Anchored(p, p), update)


def bare():
    """Its state has no class."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda s, g, p: s - g - p, state, grads, params), state

    return optax.GradientTransformation(lambda params: params, update)


def refusing():
    """Works with these shapes alone, and wants something that nobody has."""

    def update(grads, state, params=None, *, curvature):
        return jax.tree.map(jnp.multiply, grads, curvature), state

    return optax.GradientTransformationExtraArgs(
        lambda p: Sums(jnp.ones((7, 5)) + p["w"], ()), update
    )


def sam(period=2):
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    return optax.contrib.sam(optax.adam(0.1), adversary, sync_period=period)


def warned(optimizer, sync=None, gradients=None):
    """Warnings of a step's first state."""
    if sync is None and gradients is None:
        sync = js.local_sgd("replica", sync_every=4)
    step = js.make_train_step(
        lambda p, b: jnp.sum(b), optimizer, sync=sync, gradients=gradients, mesh=MESH
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.init(PARAMS)
        step.init(PARAMS)  # tried once
    return [str(x.message) for x in caught]


@pytest.mark.parametrize(
    ("optimizer", "who"),
    [
        (optax.chain(optax.clip(1.0), dual_averaging(Sums)), "Sums"),
        (optax.MultiSteps(dual_averaging(Sums), 1).gradient_transformation(), "Sums"),
        (bare(), "arrays without a class"),
    ],
)
def test_one_that_takes_exchanges_back(optimizer, who):
    (message,) = warned(optimizer)
    assert f"(its state has {who})" in message
    assert "undone 100% after 3 updates" in message
    assert "js.remembers_parameters" in message


@pytest.mark.parametrize(
    "optimizer", [dual_averaging(Told), pulled(0.01), optax.adam(0.1), refusing(), anchored()]
)
def test_one_that_does_not(optimizer):
    assert not warned(optimizer)


def test_a_strong_pull_is_told():
    (message,) = warned(pulled(0.2))
    assert "undone 49%" in message  # 1 - 0.8 ** 3


def test_gradients_that_are_averaged_need_no_trial():
    assert not warned(dual_averaging(Sums), gradients=js.all_reduce_gradients("replica"))


@pytest.mark.parametrize(
    ("optimizer", "sync", "period"),
    [
        (sam(), js.local_sgd("replica", sync_every=4), None),
        (sam(), js.local_sgd("replica", sync_every=3), 2),
        (optax.chain(optax.clip(1.0), sam(3)), js.local_sgd("replica", sync_every=4), 3),
        (sam(), js.sgp("replica"), 2),
        (sam(3), js.diloco("replica", sync_every=6), None),
    ],
)
def test_sam_and_a_schedule_that_does_not_fit(optimizer, sync, period):
    messages = warned(optimizer, sync)
    if period is None:
        assert not messages
    else:
        assert [
            f"with a period of {period}," in m and f"multiple of {period}." in m for m in messages
        ]
        assert len(messages) == 1
