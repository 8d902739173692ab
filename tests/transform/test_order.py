"""Parameter transforms come last in chains, wherever these are."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

MESH = js.virtual_mesh({"replica": 2})
STACKED = {"b": np.ones((2, 3), np.float32), "w": np.ones((2, 4), np.float32)}
average = js.local_sgd("replica", sync_every=2)
plain = optax.sgd(0.1)
both = {"b": True, "w": True}


def own_transform():
    """A parameter transform of a user's own, known by the first state that is made."""

    class OwnState(NamedTuple):
        count: jax.Array

    def update(updates, state, params=None, **extra):
        return updates, state

    return js.ParameterTransform(
        lambda params: OwnState(jnp.zeros([], jnp.int32)),
        update,
        phase=lambda t, skipped=0: (),
        due=lambda t: False,
        schedules=(),
    )


wrong_chain = optax.chain(average, plain)
FIRST = r"\[0\], LocalSGDState, stands \[1\]\[0\]"
WRONG = {
    "chain": (wrong_chain, FIRST),
    "scaled": (optax.chain(plain, average, optax.scale(0.5)), r"\[1\].*stands \[2\]"),
    "nested": (optax.chain(optax.chain(plain, average), plain), r"\[0\]\[1\].*\[1\]\[0\]"),
    "named": (optax.named_chain(("z", average), ("a", plain)), r"\['z'\].*stands \['a'\]"),
    "masked": (optax.masked(wrong_chain, both), FIRST),
    "in a chain": (optax.chain(plain, optax.masked(wrong_chain, both)), FIRST),
    "partition": (optax.partition({"x": wrong_chain, "y": plain}, {"b": "x", "w": "y"}), FIRST),
    "steps": (optax.MultiSteps(wrong_chain, 2), FIRST),
    "slowmo": (
        optax.chain(js.slowmo("replica", base=average, sync_every=4), optax.clip(1.0)),
        r"\[0\], OuterState, stands \[1\], EmptyState",
    ),
    "one's own": (optax.chain(own_transform(), plain), r"\[0\], OwnState, stands"),
}


@pytest.mark.parametrize("what", WRONG)
def test_parameter_transforms_come_last(what):
    """What follows would scale or clip the way to the synchronised parameters, silently."""
    tx, where = WRONG[what]
    with pytest.raises(ValueError, match=f"init: .*must come last: after {where}"):
        js.init(tx, STACKED, mesh=MESH)


right_chain = optax.chain(plain, average)
RIGHT = {
    "last": right_chain,
    "alone": average,
    "nested": optax.chain(optax.clip(1.0), right_chain),
    "named": optax.named_chain(("z", plain), ("a", average)),
    "partition": optax.partition({"x": right_chain, "y": plain}, {"b": "x", "w": "y"}),
    "two": optax.chain(plain, average, js.slowmo("replica", base=average, sync_every=4)),
    "none": plain,
}


@pytest.mark.parametrize("what", RIGHT)
def test_chains_in_order_are_taken(what):
    js.init(RIGHT[what], STACKED, mesh=MESH)


def test_a_step_asks_it_of_its_optimizer():
    def step_of(optimizer, **options):
        return js.make_train_step(
            lambda params, batch: (params["w"] * batch).sum(), optimizer, mesh=MESH, **options
        )

    one = jax.tree.map(lambda x: x[0], STACKED)
    with pytest.raises(ValueError, match=r"must come last: after .*LocalSGDState, stands"):
        step_of(wrong_chain).init(one)
    step_of(right_chain).init(one)  # what stands after it, without a `sync`
    step_of(plain, sync=average).init(one)
