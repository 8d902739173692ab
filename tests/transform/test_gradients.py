"""When gradient transforms of a user's own reduce, and that what is around them asks them."""

import jax.numpy as jnp
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.transform import spec_of

PARAMS = {"w": jnp.ones((4, 2))}
COUNTING = optax.scale_by_schedule(lambda count: 1.0)
AXES = ("replica",)


class EverySecond(js.GradientSpec):
    def due(self, state):
        return state.count % 2 == 1


OWN = {
    "a function": js.gradient_transform(COUNTING, AXES, due=lambda state: state.count % 2 == 1),
    "a class": js.GradientTransform(*COUNTING, EverySecond(axes=AXES, takes={"weight"})),
}


@pytest.mark.parametrize("name", OWN)
def test_one_that_reduces_in_every_second_update(name):
    for tx in (OWN[name], js.chain(optax.clip(1.0), OWN[name])):
        state, found = tx.init(PARAMS), []
        for _ in range(4):
            found.append([each.axes for each in spec_of(tx).reductions(state) if each.due])
            _, state = tx.update(PARAMS, state, PARAMS)
        assert found == [[], [AXES]] * 2
        assert (tx.spec.axes, tx.spec.takes) == (AXES, {"weight"})
