"""`uniform` keeps a cond a cond."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxslowmo.mesh import uniform


def step(x, t, axes=("replica",)):
    due = uniform(t == 4, axes)
    return lax.cond(due, lambda v: lax.pmean(v, "replica"), lambda v: v + 1.0, x)


def test_a_cond_stays_a_cond_under_vmap():
    names = ["replica", "node"]
    fn = functools.partial(step, axes=names)
    for name in names:
        fn = jax.vmap(fn, axis_name=name)
    x, t = jnp.ones((2, 2, 3)), jnp.zeros((2, 2), jnp.int32)
    text = jax.jit(fn).lower(x, t).as_text()
    assert "stablehlo.case" in text or "stablehlo.if" in text
    assert "stablehlo.select" not in text
