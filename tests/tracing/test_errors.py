"""Losses that cannot be traced are refused, by the argument that is wrong."""

import jax
import jax.numpy as jnp

import jaxslowmo as js
from support.refusals import Refusal, each

VECTOR = jax.ShapeDtypeStruct((3,), jnp.float32)


def product(params, x):
    return jnp.sum(params * x)


def traced(argument, value="", loss=product, params=VECTOR, fn=js.gradients.ready_order, **options):
    return Refusal(lambda: fn(loss, params, VECTOR, **options), argument, value)


ROWS = {
    "a number as a loss": traced("`loss_fn`", "int", 3),
    "a vector as a loss": traced("`loss_fn`", "(3,)", lambda p, x: p * x),
    "an int32 parameter": traced("`params`", "n (int32)", params={"n": jnp.ones(3, jnp.int32)}),
    "model state of a loss without": traced("`model_state`", model_state={"mean": VECTOR}),
    "unused parameters": traced(
        "`params`",
        "head/bias, tail",
        lambda p, x: product(p["head"]["kernel"], x),
        {"head": {"bias": VECTOR, "kernel": VECTOR}, "tail": VECTOR},
        js.gradients.check_all_used,
    ),
}


@each(ROWS)
def test_refused(refusal):
    refusal.check()
