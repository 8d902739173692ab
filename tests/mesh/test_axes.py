"""`uniform` keeps a cond a cond, and values get the types that branches need."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.mesh import checks_varying, match_varying, uniform, vary_over, varying_axes


def step(x, t, axes=("replica",)):
    due = uniform(t == 4, axes)
    return lax.cond(due, lambda v: lax.pmean(v, "replica"), lambda v: v + 1.0, x)


def lowered(fn, *args) -> str:
    return jax.jit(fn).lower(*args).as_text()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_cond_stays_a_cond_under_vmap(depth):
    names = ["replica", "node", "slice"][:depth]
    fn, shape = functools.partial(step, axes=names), (2,) * depth
    for name in names:
        fn = jax.vmap(fn, axis_name=name)
    x, t = jnp.ones((*shape, 3)), jnp.zeros(shape, jnp.int32)
    text = lowered(fn, x, t)
    assert "stablehlo.case" in text or "stablehlo.if" in text
    assert "stablehlo.select" not in text
    jaxpr = str(jax.make_jaxpr(fn)(x, t))
    assert "cond[" in jaxpr
    assert "select_n" not in jaxpr


def test_without_it_the_cond_becomes_a_select():
    """What the test above would see otherwise."""

    def bare(x, t):
        return lax.cond(t % 2 == 0, lambda v: v * 2.0, lambda v: v + 1.0, x)

    jaxpr = str(jax.make_jaxpr(jax.vmap(bare))(jnp.ones((2, 3)), jnp.zeros(2, jnp.int32)))
    assert "select_n" in jaxpr
    assert "cond[" not in jaxpr


def test_values_under_nested_vmap():
    both = functools.partial(step, axes=("replica", "inner"))
    fn = jax.jit(jax.vmap(jax.vmap(both, axis_name="inner"), axis_name="replica"))
    x = jnp.arange(12.0).reshape(2, 2, 3)
    mean = np.broadcast_to(np.asarray(x).mean(0), (2, 2, 3))
    assert np.array_equal(fn(x, jnp.full((2, 2), 4)), mean)
    assert np.array_equal(fn(x, jnp.full((2, 2), 3)), x + 1)


@pytest.mark.parametrize("name", [None, "run"])
def test_runs_that_differ_under_an_outer_vmap(name):
    """Each run decides for itself: one is at its fourth update, the other is not."""
    fn = jax.jit(jax.vmap(jax.vmap(step, axis_name="replica"), axis_name=name))
    x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    counts = jnp.array([[4, 4], [2, 2]])
    expected = np.stack([np.broadcast_to(x[0].mean(0), (2, 3)), x[1] + 1])
    assert np.array_equal(fn(x, counts), expected)


@pytest.mark.parametrize("execution", ["shard_map", "unchecked", "pmap"])
def test_nothing_is_sent_for_it_on_devices(execution, mesh_of):
    fn = lambda x: uniform(x[0] > 0, ("replica",))[None]  # noqa: E731
    if execution == "pmap":
        mapped = jax.pmap(fn, axis_name="replica", devices=jax.devices()[:4])
        args = jnp.ones((4, 1))
    else:
        mapped = jax.shard_map(
            fn,
            mesh=mesh_of({"replica": 4}),
            in_specs=P("replica"),
            out_specs=P("replica"),
            check_vma=execution == "shard_map",
        )
        args = jnp.ones(4)
    assert "all_reduce" not in lowered(mapped, args)


def test_in_a_scan_under_vmap():
    def run(x):
        counts = jnp.arange(3, 6)
        return lax.scan(lambda carry, t: (step(carry, t), None), x, counts)[0]

    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    out = jax.jit(jax.vmap(run, axis_name="replica"))(x)
    # One more, the mean, one more.
    assert np.array_equal(out, np.broadcast_to(x.mean(0) + 2, (2, 3)))


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
        return match_varying(mean, x)

    mesh = js.make_mesh({"replica": 4, "device": 2})
    jax.eval_shape(
        jax.shard_map(
            per_device,
            mesh=mesh,
            in_specs=P("replica"),
            out_specs=P("replica"),
            check_vma=check_vma,
        ),
        jnp.ones(4),
    )
    replica = frozenset({"replica"}) if check_vma else frozenset()
    assert seen == {
        "tracked": check_vma,
        "x": replica,
        "mean": frozenset(),
        "cast": replica,
        "twice": replica,
        "matched": replica,
    }


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_tree_asks_once_per_axis(check_vma):
    """To ask whether types are tracked is an equation, which stays in the program."""

    def asked(fn) -> int:
        found = []

        def per_device(x):
            tree = {str(i): x + i for i in range(10)} | {"mean": lax.pmean(x, "replica")}
            jaxpr = jax.make_jaxpr(lambda t: fn(t))(tree)
            found.append(sum(e.primitive.name == "axis_index" for e in jaxpr.jaxpr.eqns))
            return x

        mesh = js.make_mesh({"replica": 4, "device": 2})
        specs = {"in_specs": P("replica"), "out_specs": P("replica")}
        mapped = jax.shard_map(per_device, mesh=mesh, check_vma=check_vma, **specs)
        jax.eval_shape(mapped, jnp.ones(4))
        return found[0]

    without = {str(i) for i in range(10)}
    assert asked(lambda t: vary_over(t, ("replica", "device"))) == 2
    assert asked(lambda t: match_varying(t, {**t, "mean": t["1"]})) == 0
    varying = asked(lambda t: vary_over({k: t[k] for k in without}, ("replica",)))
    assert varying == (0 if check_vma else 1)


def test_types_of_what_a_traced_program_returns():
    def per_device(x):
        jaxpr = jax.make_jaxpr(lambda v: (v, lax.pmean(v, "replica")))(x).jaxpr
        assert [varying_axes(v.aval) for v in jaxpr.outvars] == [{"replica"}, frozenset()]
        return x

    specs = {"in_specs": P("replica"), "out_specs": P("replica")}
    jax.eval_shape(
        jax.shard_map(per_device, mesh=js.make_mesh({"replica": 4}), **specs), jnp.ones(4)
    )
