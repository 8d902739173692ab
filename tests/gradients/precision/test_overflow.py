"""What counts as an overflow, and who is asked."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxslowmo.gradients.precision._mixed_precision import (
    anywhere,
    as_before_if,
    overflowed,
    zero_if,
)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_every_dtype_that_can_overflow(bad):
    for dtype in ("float32", "bfloat16", "float16", "complex64"):
        good = {"a": jnp.ones(3, dtype), "none": jnp.zeros((0, 2)), "scalar": jnp.zeros([])}
        assert not overflowed(good)
        assert overflowed(good | {"a": good["a"].at[1].set(bad)})


def test_what_is_no_number_stays_as_it_is():
    tree = {"rows": jnp.arange(3), "key": jax.random.key(0), "x": jnp.asarray([1.0, jnp.inf])}
    assert not overflowed({name: tree[name] for name in ("rows", "key")})
    assert not overflowed({})
    zeros = zero_if(jnp.asarray(True), tree)
    np.testing.assert_array_equal(zeros["x"], [0, 0])
    assert zeros["rows"] is tree["rows"]
    assert zeros["key"] is tree["key"]
    other = {"rows": tree["rows"] + 1, "key": jax.random.key(1), "x": jnp.zeros(2, jnp.float16)}
    before = as_before_if(jnp.asarray(True), other, tree)
    np.testing.assert_array_equal(before["rows"], tree["rows"])
    assert before["key"] == tree["key"]
    assert before["x"].dtype == jnp.float16


def test_replicas_without_data_are_asked_only_among_themselves():
    cases = np.asarray(list(itertools.product([0, 1], repeat=6)), bool)
    found, counts = cases[:, :3].T, cases[:, 3:].T.astype(np.float32)
    ask = jax.vmap(lambda f, w: jax.vmap(lambda f, w: anywhere(f, ["r"], w))(f, w), axis_name="r")
    heard = np.asarray(ask(jnp.asarray(found), jnp.asarray(counts)))
    active = counts > 0
    want = np.where(active.any(0), (found & active).any(0), found.any(0))
    np.testing.assert_array_equal(heard, np.tile(want, (3, 1)))
