"""`uniform` keeps a cond a cond, and values get the types that branches need."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.mesh import (
    axes_of,
    checks_varying,
    device_keys,
    match_varying,
    only_over,
    own_keys,
    uniform,
    vary_over,
    varying_axes,
)


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


def test_values_in_a_scan_under_nested_vmap():
    both = functools.partial(step, axes=("replica", "inner"))

    def run(x):
        return lax.scan(lambda carry, t: (both(carry, t), None), x, jnp.arange(3, 6))[0]

    fn = jax.jit(jax.vmap(jax.vmap(run, axis_name="inner"), axis_name="replica"))
    x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    # One more, the mean, one more.
    assert np.array_equal(fn(x), np.broadcast_to(x.mean(0) + 2, (2, 2, 3)))


def test_runs_that_differ_under_an_outer_vmap():
    """Each run decides for itself: one is at its fourth update, the other is not."""
    fn = jax.jit(jax.vmap(jax.vmap(step, axis_name="replica")))
    x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    counts = jnp.array([[4, 4], [2, 2]])
    expected = np.stack([np.broadcast_to(x[0].mean(0), (2, 3)), x[1] + 1])
    assert np.array_equal(fn(x, counts), expected)


def test_an_index_is_the_largest_and_nothing_is_sent_for_it_on_devices(mesh_of):
    index = jax.vmap(lambda x: uniform(x, ("replica",)), axis_name="replica", out_axes=None)
    assert index(jnp.array([3, 3])) == 3
    mapped = jax.shard_map(
        lambda x: uniform(x[0] > 0, ("replica",))[None],
        mesh=mesh_of({"replica": 4}),
        in_specs=P("replica"),
        out_specs=P("replica"),
    )
    assert "all_reduce" not in jax.jit(mapped).lower(jnp.ones(4)).as_text()


@pytest.mark.parametrize("check_vma", [True, False])
def test_types_of_varying_values(check_vma):
    seen = {}

    def per_device(x):
        mean = lax.pmean(x, "replica")
        seen["tracked"] = checks_varying("replica")
        seen["x"], seen["mean"] = varying_axes(x), varying_axes(mean)
        seen["cast"] = varying_axes(vary_over({"m": mean}, ("replica",))["m"])
        seen["twice"] = varying_axes(vary_over(x, ("replica",)))
        seen["matched"] = varying_axes(match_varying(mean, x))
        seen["all"] = axes_of({"x": x, "mean": mean})
        jaxpr = jax.make_jaxpr(lambda v: (v, lax.pmean(v, "replica")))(x).jaxpr
        seen["traced"], seen["traced mean"] = (varying_axes(v.aval) for v in jaxpr.outvars)
        # To ask whether types are tracked is an equation, which stays: once per axis and tree.
        tree = {str(i): x + i for i in range(10)} | {"mean": mean}
        asked = jax.make_jaxpr(lambda t: vary_over(t, ("replica", "device")))(tree)
        seen["asked"] = sum(e.primitive.name == "axis_index" for e in asked.jaxpr.eqns)
        return match_varying(mean, x)

    mesh = js.make_mesh({"replica": 4, "device": 2})
    specs = {"in_specs": P("replica"), "out_specs": P("replica"), "check_vma": check_vma}
    jax.eval_shape(jax.shard_map(per_device, mesh=mesh, **specs), jnp.ones(4))
    varying = dict.fromkeys(
        ("x", "cast", "twice", "matched", "all", "traced"),
        frozenset({"replica"} if check_vma else ()),
    )
    equal = dict.fromkeys(("mean", "traced mean"), frozenset())
    assert seen == {"tracked": check_vma, "asked": 2, **varying, **equal}


@pytest.mark.parametrize("inside", [False, True])
def test_keys_of_positions_are_their_own_and_that_of_position_0_stays(inside):
    """One number is folded in; for devices inside of a replica another one before it."""
    key = jax.random.key(7)
    change = device_keys if inside else own_keys

    def per_position(_):
        return jax.random.key_data(change({"k": key, "n": jnp.ones(2)}, ("a", "b"))["k"])

    found = jax.vmap(jax.vmap(per_position, axis_name="b"), axis_name="a")(jnp.ones((2, 3)))
    start = jax.random.fold_in(key, 0x9E3779B9) if inside else key
    for i in range(2):
        for j in range(3):
            wanted = jax.random.fold_in(start, 3 * i + j) if i or j else key
            np.testing.assert_array_equal(found[i, j], jax.random.key_data(wanted))


def test_specs_are_restricted_to_axes():
    spec = P(("a", "b"), None, "c", ("a", "d"), "b")
    assert only_over(spec, frozenset("ac")) == P("a", None, "c", "a")
    assert only_over(spec, frozenset("ab")) == P(("a", "b"), None, None, "a", "b")
    assert only_over(spec, frozenset("e")) == P()
