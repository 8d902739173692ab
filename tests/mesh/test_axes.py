"""`uniform` keeps a cond a cond, and values get the types that branches need."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo._support.types import checks_varying, tracks_types, varying_axes
from jaxslowmo.mesh import (
    match_varying,
    max_over,
    sum_over,
    uniform,
    vary_over,
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
        seen["anywhere"] = tracks_types()
        seen["x"], seen["mean"] = varying_axes(x), varying_axes(mean)
        seen["cast"] = varying_axes(vary_over({"m": mean}, ("replica",))["m"])
        seen["twice"] = varying_axes(vary_over(x, ("replica",)))
        seen["matched"] = varying_axes(match_varying(mean, x))
        jaxpr = jax.make_jaxpr(lambda v: (v, lax.pmean(v, "replica")))(x).jaxpr
        seen["traced"], seen["traced mean"] = (varying_axes(v.aval) for v in jaxpr.outvars)
        return match_varying(mean, x)

    mesh = js.make_mesh({"replica": 4, "device": 2})
    specs = {"in_specs": P("replica"), "out_specs": P("replica"), "check_vma": check_vma}
    jax.eval_shape(jax.shard_map(per_device, mesh=mesh, **specs), jnp.ones(4))
    varying = dict.fromkeys(
        ("x", "cast", "twice", "matched", "traced"),
        frozenset({"replica"} if check_vma else ()),
    )
    equal = dict.fromkeys(("mean", "traced mean"), frozenset())
    assert seen == {"tracked": check_vma, "anywhere": check_vma, **varying, **equal}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("join", [sum_over, max_over])
def test_what_is_joined_over_axes_is_typed_as_equal_over_them(join, check_vma, mesh_of):
    """Over axes of size 1, too, where nothing is sent; values may vary over some of the axes."""

    def per_device(x):
        alone = join(x, "alone")
        return join(alone, ("replica", "device")), alone

    mapped = jax.shard_map(
        per_device,
        mesh=mesh_of({"replica": 2, "device": 2, "alone": 1}),
        in_specs=P(("replica", "alone")),
        out_specs=(P(), P("replica")),
        check_vma=check_vma,
    )
    whole, alone = jax.jit(mapped)(jnp.array([1.0, 2.0]))
    assert whole.tolist() == [6.0 if join is sum_over else 2.0]
    assert alone.tolist() == [1.0, 2.0]
