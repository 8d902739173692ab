"""Buffers are taken apart at once; updates land where they should."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxslowmo.tree import (
    all_finite,
    apply_exactly,
    params_after_update,
    plan_buffers,
    updates_to,
    widen_updates,
)
from support.promotion import apply_updates


def test_a_buffer_is_taken_apart_at_once():
    """An equation per leaf to give it its shape, and one for all."""
    tree = {str(i): jnp.ones((2, 3)) for i in range(20)}
    plan = plan_buffers(tree)
    flat = jax.ShapeDtypeStruct((125,), jnp.float32)  # padded
    (once,) = jax.make_jaxpr(plan.unpack)([flat]).jaxpr.eqns
    names = [e.primitive.name for e in once.params["jaxpr"].jaxpr.eqns]
    assert names == ["split", *["reshape"] * 20]
    # In the program they are the slices that they were.
    text = jax.jit(plan.unpack).lower([flat]).as_text()
    assert text.count("stablehlo.slice") == 21


def test_only_numbers_that_may_be_infinite_count_as_not_finite():
    fine = {"f": jnp.ones(2, jnp.bfloat16), "i": jnp.array([2**31 - 1]), "k": jax.random.key(0)}
    assert all_finite(fine)
    assert all_finite({})
    for wrong in (jnp.nan, jnp.inf, -jnp.inf):
        assert not all_finite({**fine, "g": jnp.array([0.0, wrong])})


def exchange_of(leaves, mesh, sizes=(6, 8)):
    """A mean of so many leaves of two sizes through one buffer; its parts; arguments for both."""
    tree = [jnp.arange(4.0 * sizes[i % 2]).reshape(4, -1) + i for i in range(leaves)]
    plan = plan_buffers([x[0] for x in tree])

    def per_device(*tree):
        flats = plan.pack([x[0] for x in tree])
        return [x[None] for x in plan.unpack([jax.lax.psum(flat, "replica") for flat in flats])]

    specs = jax.P("replica")
    return jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=specs), tree


def test_many_parts_are_right_forwards_and_backwards(mesh_of):
    fn, tree = exchange_of(34, mesh_of({"replica": 4}))

    def both(*tree):
        sums, back = jax.vjp(fn, *tree)
        return sums, back([jnp.ones_like(x) for x in sums])

    program = str(jax.make_jaxpr(both)(*tree))
    assert program.count("dynamic_slice[") == 34
    assert "dynamic_update_slice" not in program
    for x, total, gradient in zip(tree, *jax.jit(both)(*tree), strict=True):
        assert np.array_equal(total, np.broadcast_to(x.sum(0), x.shape))
        assert np.array_equal(gradient, np.full(x.shape, 4.0))


seeds = st.integers(0, 10_000)


@given(seeds, st.sampled_from([1.0, 1e-3, 1e3]))
def test_float32_lands_within_one_ulp_of_the_larger_operand(seed, scale):
    rng = np.random.default_rng(seed)
    params = rng.normal(size=500).astype(np.float32)
    target = (scale * rng.normal(size=500)).astype(np.float32)
    landed = np.asarray(optax.apply_updates(params, updates_to(params, target)))
    ulp = np.spacing(np.maximum(np.abs(params), np.abs(target)))
    assert np.all(np.abs(landed.astype(np.float64) - target) <= ulp)
    assert np.array_equal(optax.apply_updates(params, updates_to(params, params)), params)


# Exponents that the significands of both operands fit into float32 with: 24 bits less their own.
RANGES = {"bfloat16": 16, "float16": 13}


@pytest.mark.parametrize("dtype", RANGES)
@given(seed=seeds)
def test_half_precision_lands_exactly_in_its_range(dtype, seed):
    rng = np.random.default_rng(seed)
    largest = RANGES[dtype] - 2  # room for the significands, which reach up to 2
    small = rng.normal(size=500).astype(jnp.dtype(dtype))
    small = np.where(np.abs(small) < 0.01, jnp.dtype(dtype).type(1), small)
    factor = (2.0 ** rng.integers(0, largest, size=500)) * rng.choice([-1, 1], size=500)
    large = np.clip(small.astype(np.float32) * factor, -6e4, 6e4).astype(jnp.dtype(dtype))
    for params, target in ((small, large), (large, small)):
        updates = updates_to(params, target)
        assert updates.dtype == jnp.float32
        landed = apply_updates(params, updates)
        assert landed.dtype == params.dtype
        assert np.array_equal(landed, target)


@given(seeds)
def test_explicit_promotion_equals_optax(seed):
    rng = np.random.default_rng(seed)
    params = {
        "f": rng.normal(size=20).astype(np.float32),
        "b": rng.normal(size=20).astype(jnp.bfloat16),
        "h": rng.normal(size=()).astype(np.float16),
    }
    updates = widen_updates(
        jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
    )
    ours, theirs = apply_exactly(params, updates), apply_updates(params, updates)
    for key in params:
        assert ours[key].dtype == theirs[key].dtype == params[key].dtype
        assert np.array_equal(ours[key], theirs[key])


def test_nothing_is_narrowed():
    with jax.enable_x64(True):
        params = {"d": jnp.ones(2, jnp.float64), "b": jnp.ones(2, jnp.bfloat16)}
        updates = {"d": jnp.full(2, 2**-40, jnp.float64), "b": jnp.full(2, 2**-12, jnp.bfloat16)}
        y = params_after_update(params, updates)
        assert (y["d"].dtype, y["b"].dtype) == (jnp.float64, jnp.float32)
        assert np.all(np.asarray(y["d"]) == 1 + 2**-40)
        assert np.all(np.asarray(y["b"]) == 1 + 2**-12)  # not rounded to bfloat16
        assert widen_updates(updates)["d"].dtype == jnp.float64
        assert apply_exactly(params, updates)["d"].dtype == jnp.float64
