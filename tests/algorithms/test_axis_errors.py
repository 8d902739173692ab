"""Axes that are not there, and other bad axes, are refused by name."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.bad_input import (
    ALL,
    PARAMETER_TRANSFORMS,
    PARAMS,
    one_update,
    slowmo_over_local,
    trace,
)
from support.executions import EXECUTIONS

# Axes


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", ALL)
def test_misspelt_axis_says_which_are_bound(name, execution):
    right, wrong = ALL[name]("replica"), ALL[name]("replika")
    message = r"`axis_name` 'replika' is not a mapped axis here \(bound: 'replica'\)"
    with pytest.raises(ValueError, match=message):
        trace(one_update(wrong, init=right), PARAMS, execution=execution)


@pytest.mark.parametrize("execution", ["vmap", "shard_map", "shard_map_unchecked"])
def test_all_bound_axes_are_named(execution):
    def step(params):
        return one_update(js.local_sgd(("replica", "devise")))(params)

    with pytest.raises(ValueError, match=r"'devise' .* \(bound: 'replica', 'device'\)"):
        trace(step, PARAMS, execution=execution, axes={"replica": 4, "device": 2})


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", ["slowmo", "diloco"])
def test_misspelt_axis_at_init(name, execution):
    tx = ALL[name]("replika")
    with pytest.raises(ValueError, match=rf"{name}: .*'replika'.*bound: 'replica'.*js\.init"):
        trace(tx.init, PARAMS, execution=execution)


@pytest.mark.parametrize("name", ["slowmo", "diloco"])
def test_init_outside_of_the_axis_points_to_js_init(name):
    with pytest.raises(ValueError, match=rf"{name}: .*bound: none.*`js\.init\(tx, stacked_params"):
        ALL[name]("replica").init(PARAMS)


@pytest.mark.parametrize(
    "tx",
    [
        js.local_sgd("replica"),
        slowmo_over_local(shard_state=False),
        slowmo_over_local(exact_average=False),
        js.diloco("replica", shard_state=False),
    ],
)
def test_init_that_shards_nothing_needs_no_axis(tx):
    """As nnx.Optimizer and TrainState.create call it."""
    one = jax.tree.map(lambda x: x[0], PARAMS)
    inside = jax.vmap(tx.init, axis_name="replica")(PARAMS)
    outside = tx.init(one)
    for a, b in zip(jax.tree.leaves(inside), jax.tree.leaves(outside), strict=True):
        assert np.array_equal(a[0], b)


@pytest.mark.parametrize("name", ALL)
def test_update_outside_of_the_axis(name):
    state = jax.tree.map(
        lambda x: x[0],
        js.init(
            ALL[name]("replica"), PARAMS, mesh=js.virtual_mesh({"replica": 4}), axis_name="replica"
        ),
    )
    with pytest.raises(ValueError, match=rf"{name}: `axis_name` 'replica' .*bound: none"):
        ALL[name]("replica").update(PARAMS, state, PARAMS)


@pytest.mark.parametrize("name", PARAMETER_TRANSFORMS)
@pytest.mark.parametrize("execution", ["vmap", "shard_map"])
def test_misspelt_local_axis(name, execution):
    make = PARAMETER_TRANSFORMS[name]
    message = rf"{name}: `local_axis_name` 'devise' is not a mapped axis here .*bound: 'replica'"
    with pytest.raises(ValueError, match=message):
        trace(
            one_update(make("replica", local_axis_name="devise"), init=make("replica")),
            PARAMS,
            execution=execution,
        )


@pytest.mark.parametrize("name", ["slowmo", "diloco"])
def test_misspelt_local_axis_at_init(name):
    tx = PARAMETER_TRANSFORMS[name]("replica", local_axis_name="devise")
    mesh = js.make_mesh({"replica": 4})
    message = rf"{name}: `local_axis_name` 'devise' is not a mapped axis here .*bound: 'replica'"
    with pytest.raises(ValueError, match=message):
        js.init(tx, PARAMS, mesh=mesh, axis_name="replica")


@pytest.mark.parametrize("name", PARAMETER_TRANSFORMS)
def test_local_axis_differs_from_the_replica_axis(name):
    tx = PARAMETER_TRANSFORMS[name]("replica", local_axis_name="replica")
    with pytest.raises(ValueError, match=rf"{name}: `local_axis_name` must differ .*'replica'"):
        trace(one_update(tx), PARAMS)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("axis", [None, 3, "", (), ("replica", 2), ["replica"]])
def test_axis_that_is_no_name(name, axis):
    with pytest.raises(
        ValueError, match=r"`axis_name` must be the name.*got " + re.escape(repr(axis))
    ):
        ALL[name](axis)


@pytest.mark.parametrize("name", ALL)
def test_axis_named_twice(name):
    with pytest.raises(ValueError, match=r"`axis_name` names an axis twice, got \('a', 'a'\)"):
        ALL[name](("a", "a"))


def test_mesh_without_the_axis():
    mesh = js.make_mesh({"replica": 4, "device": 2})
    message = r"`axis_name` 'node' is not an axis of `mesh`, which has 'replica', 'device'"
    tx = js.local_sgd("node")
    for refused in (
        lambda: js.replicate(PARAMS, mesh=mesh, axis_name="node"),
        lambda: js.consensus(PARAMS, mesh=mesh, axis_name="node"),
        lambda: js.init(tx, PARAMS, mesh=mesh, axis_name="node"),
        lambda: js.make_train_step(sum, tx, mesh=mesh, axis_name="node"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()


def test_param_specs_over_an_axis_that_the_mesh_lacks():
    tx = js.local_sgd("replica", param_specs={"b": P(), "w": P("fsdp")})
    with pytest.raises(ValueError, match=r"`param_specs` names axis 'fsdp'.*axes: 'replica'"):
        trace(one_update(tx), PARAMS, execution="shard_map")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, r"`axes` must name at least one axis"),
        ({"replica": 0}, r"size of axis 'replica' must be an int >= 1, got 0"),
        ({"replica": 2, "device": -1}, r"size of axis 'device' .* got -1"),
        ({"replica": 2.0}, r"got 2\.0"),
        ({"replica": True}, r"got True"),
    ],
)
def test_mesh_sizes(axes, message):
    for make in (js.make_mesh, js.virtual_mesh):
        with pytest.raises(ValueError, match=message):
            make(axes)


def test_mesh_with_too_few_devices():
    message = r"\{'replica': 16\} need 16 devices, found 8 \(cpu\).*16.*js\.virtual_mesh"
    with pytest.raises(ValueError, match=message):
        js.make_mesh({"replica": 16})
    with pytest.raises(ValueError, match=r"need 2 devices, found 1"):
        js.make_mesh({"replica": 2}, devices=jax.devices()[:1])
