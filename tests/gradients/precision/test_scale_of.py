"""The scale is found wherever the wrapper stands, and refused where it would not work."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.gradients.precision import check_place

PARAMS = {"w": jnp.ones(2)}
SCALED = js.dynamic_loss_scale(optax.sgd(0.1), initial=8.0)

AROUND = {
    "itself": SCALED,
    "optax.chain": optax.chain(optax.identity(), SCALED),
    "optax.named_chain": optax.named_chain(("scaled", SCALED)),
    "js.chain": js.chain(SCALED, js.local_sgd("replica")),
    "js.accumulate": js.accumulate(SCALED, 2),
    "js.skip_unused": js.skip_unused(SCALED, "replica"),
    "inject_hyperparams": optax.inject_hyperparams(
        lambda rate: js.dynamic_loss_scale(optax.sgd(rate), initial=8.0)
    )(0.1),
}


@pytest.mark.parametrize("name", AROUND)
def test_found_inside_of(name):
    state = AROUND[name].init(PARAMS)
    assert js.loss_scale_of(state) == 8
    check_place(state)


def test_none_without_one_and_a_stack_of_them():
    assert js.loss_scale_of(optax.adam(0.1).init(PARAMS)) is None
    stacked = SCALED.init(PARAMS)._replace(loss_scale=np.float32([8, 4]))
    np.testing.assert_array_equal(js.loss_scale_of((stacked, ())), [8, 4])


def test_two_scales_are_refused():
    state = optax.chain(SCALED, SCALED).init(PARAMS)
    for ask in (js.loss_scale_of, check_place):
        with pytest.raises(ValueError, match=r"one loss scale.*found 2"):
            ask(state)


@pytest.mark.parametrize(
    ("tx", "why"),
    [
        (optax.apply_if_finite(SCALED, 3), "apply_if_finite, which keeps every overflow"),
        (optax.MultiSteps(SCALED, 2).gradient_transformation(), "MultiSteps, whose sum"),
        (optax.chain(optax.apply_if_finite(optax.chain(SCALED), 3)), "apply_if_finite"),
    ],
)
def test_useless_inside_of(tx, why):
    with pytest.raises(ValueError, match=why):
        check_place(tx.init(PARAMS))
