"""The first state of a step warns of optimizers that undo exchanges, or do not fit the schedule."""

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
EVERY_4 = js.local_sgd("replica", sync_every=4)


class Sums(NamedTuple):
    start: Any
    total: Any


class Told(NamedTuple):
    start: Any
    total: Any


class Anchored(NamedTuple):
    origin: Any
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


def pulled(strength, kind=Anchored, back=0.0):
    """A decay of its own, or a pull to where all replicas began."""

    def update(grads, state, params=None):
        pull = lambda g, p, o: strength * (back * o - p) - 0.1 * g  # noqa: E731
        return jax.tree.map(pull, grads, params, state[0]), state

    return optax.GradientTransformation(lambda p: kind(p, p), update)


class Decay(NamedTuple):
    unused: Any
    seen: Any


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


def several(k):
    return optax.MultiSteps(optax.adam(0.1), k).gradient_transformation()


SUMS = optax.MultiSteps(dual_averaging(Sums), 1).gradient_transformation()
LOST = "undone 100% after 3 updates"
# What exchanges, and what the message says; None for no message.
CASES = {
    "takes back": (optax.chain(optax.clip(1.0), SUMS), {"sync": EVERY_4}, ("has Sums", LOST)),
    "without a class": (bare(), {"sync": EVERY_4}, ("arrays without a class", LOST)),
    "a strong pull": (pulled(0.2, Decay), {"sync": EVERY_4}, ("Decay", "undone 49%")),  # 1 - .8**3
    "a weak pull": (pulled(0.01, Decay), {"sync": EVERY_4}, None),
    "pulled to the origin": (pulled(0.2, back=1.0), {"sync": EVERY_4}, None),
    "told": (dual_averaging(Told), {"sync": EVERY_4}, None),
    "of optax": (optax.adam(0.1), {"sync": EVERY_4}, None),
    "cannot be tried": (refusing(), {"sync": EVERY_4}, None),
    "gradients": (SUMS, {"gradients": js.all_reduce_gradients("replica")}, None),
    "sam fits": (sam(), {"sync": EVERY_4}, None),
    "sam fits diloco": (sam(3), {"sync": js.diloco("replica", sync_every=6)}, None),
    "sam does not": (
        sam(), {"sync": js.local_sgd("replica", sync_every=3)}, ("period of 2,", "multiple of 2.")
    ),
    "sam in a chain": (optax.chain(optax.clip(1.0), sam(3)), {"sync": EVERY_4}, ("period of 3,",)),
    "collecting fits": (several(2), {"sync": EVERY_4}, None),
    "collecting does not": (
        several(4), {"sync": js.local_sgd("replica", sync_every=6)},
        ("optax.MultiSteps with a period of 4,", "multiple of 4."),
    ),
    "sam and gossip": (sam(), {"sync": js.sgp("replica")}, ("period of 2,",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_of_an_optimizer(name):
    optimizer, exchange, said = CASES[name]
    step = js.make_train_step(lambda p, b: jnp.sum(b), optimizer, mesh=MESH, **exchange)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.init(PARAMS)
        step.init(PARAMS)  # tried once
    messages = [str(x.message) for x in caught]
    assert len(messages) == (said is not None), messages
    assert all(part in messages[0] for part in said or ()), messages
