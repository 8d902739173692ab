"""Bad input is refused with a message that names argument, rule and value."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    warning_messages,
)
from support.executions import EXECUTIONS

# Arguments


@pytest.mark.parametrize("name", [name for name in PARAMETER_TRANSFORMS if name != "sgp"])
@pytest.mark.parametrize("sync_every", [0, -1, 2.5, "3", True])
def test_sync_every_below_one(name, sync_every):
    message = rf"`sync_every` counts updates and must be an int >= 1, got {sync_every!r}"
    with pytest.raises(ValueError, match=message):
        PARAMETER_TRANSFORMS[name]("replica", sync_every=sync_every)


@pytest.mark.parametrize("name", ALL)
def test_negative_bucket_bytes(name):
    with pytest.raises(ValueError, match=rf"{name}: `bucket_bytes` .* >= 0, got -1"):
        ALL[name]("replica", bucket_bytes=-1)


@pytest.mark.parametrize("name", PARAMETER_TRANSFORMS)
@pytest.mark.parametrize("specs", [{"w": np.zeros(2)}, {"w": P(), "b": "fsdp"}])
def test_specs_that_are_none(name, specs):
    wrong = "ndarray" if "b" not in specs else "str"
    with pytest.raises(ValueError, match=rf"{name}: `param_specs` .* PartitionSpec, got .*{wrong}"):
        PARAMETER_TRANSFORMS[name]("replica", param_specs=specs)


def test_other_bucket_arguments():
    with pytest.raises(ValueError, match=r"`first_bucket_bytes` .* >= 0, got -2"):
        js.all_reduce_gradients("replica", first_bucket_bytes=-2)
    with pytest.raises(ValueError, match=r'`order` must be "reverse", "forward" .* got \'up\''):
        js.all_reduce_gradients("replica", order="up")


# Updates


@pytest.mark.parametrize("name", PARAMETER_TRANSFORMS)
def test_missing_params(name):
    tx = PARAMETER_TRANSFORMS[name]("replica")

    def step(params):
        return tx.update(params, tx.init(params))[0]

    for execution in EXECUTIONS:
        with pytest.raises(ValueError, match=rf"{name} .*`update\(updates, state, params\)`"):
            trace(step, PARAMS, execution=execution)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (-1.0, ">= 0 and finite, got -1.0"),
        (float("nan"), ">= 0 and finite, got nan"),
        (np.ones(2, np.float32), r"real scalar.* got float32\[2\]"),
        (np.complex64(1), r"real scalar.* got complex64\[\]"),
    ],
)
def test_wrong_weights(name, weight, said):
    with pytest.raises(ValueError, match=rf"{name}: `weight` must be .*{said}"):
        trace(one_update(ALL[name]("replica"), weight=weight), PARAMS)


OTHERS = {
    "dense": {"count": jnp.zeros((4,), jnp.int32), "kernel": jnp.zeros((4, 2))},
    "mask": jnp.zeros((4, 2), bool),
    "phase": jnp.zeros((4,), jnp.complex64),
}
NAMED = r"dense/count \(int32\), mask \(bool\), phase \(complex64\).*optax\.masked"


@pytest.mark.parametrize("name", PARAMETER_TRANSFORMS)
def test_other_leaves_are_named_at_init(name):
    with pytest.raises(ValueError, match=f"{name} .*{NAMED}"):
        trace(PARAMETER_TRANSFORMS[name]("replica").init, OTHERS)


@pytest.mark.parametrize("name", ALL)
def test_other_leaves_are_named_in_update(name):
    tx = ALL[name]("replica")

    def step(params):
        return tx.update(params, tx.init(params["dense"]["kernel"]), params)[0]

    for execution in ("vmap", "shard_map"):
        with pytest.raises(ValueError, match=f"{name} .*{NAMED}"):
            trace(step, OTHERS, execution=execution)


@pytest.mark.parametrize("name", ALL)
def test_masked_leaves_are_left_alone(name):
    tx = optax.masked(
        ALL[name]("replica"), lambda tree: jax.tree.map(lambda x: x.dtype == jnp.float32, tree)
    )
    out = trace(one_update(tx), OTHERS)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), out) == jax.tree.map(
        lambda x: (x.shape, x.dtype), OTHERS
    )


@pytest.mark.parametrize(
    ("tx", "phase"),
    [
        (js.local_sgd("replica"), ("slow",)),
        (js.local_sgd("replica"), "average"),
        (js.local_sgd("replica"), ["average"]),
        (js.diloco("replica"), ("average",)),
        (slowmo_over_local(), ("gossip",)),
        (slowmo_over_local(), ("gossip", "slow")),
        (slowmo_over_local(), "slow"),
    ],
)
def test_phase_of_something_else(tx, phase):
    message = r"`phase` must come from `transform\.phase\(t\)`, a tuple of event names"
    with pytest.raises(ValueError, match=message):
        trace(one_update(tx, phase=phase), PARAMS)


# Gradients that jax has summed already


def grads_of(varying: tuple[str, ...]):
    """Gradients of parameters that vary over some of the two axes only."""

    def step(params, x):
        if varying:
            params = jax.lax.pcast(params, varying, to="varying")
        grads = jax.grad(lambda p: jnp.sum(p["w"] * x) + jnp.sum(p["b"]) * jnp.sum(x))(params)
        return js.all_reduce_gradients(("replica", "device")).update(
            grads, js.AllReduceGradientsState()
        )[0]

    return step


def mapped_over_two(step, check_vma):
    return jax.shard_map(
        step,
        mesh=js.make_mesh({"replica": 4, "device": 2}),
        in_specs=(P(), P(("replica", "device"))),
        out_specs=P(),
        check_vma=check_vma,
    )


UNSTACKED = {"b": jnp.ones(2), "w": jnp.ones(3)}


@pytest.mark.parametrize(
    ("varying", "named"),
    [
        ((), "b (over 'replica'), b (over 'device'), w (over 'replica'), w (over 'device')"),
        (("replica",), "b (over 'device'), w (over 'device')"),
    ],
)
def test_unvarying_gradients_are_refused(varying, named):
    message = "do not vary .* summed them already: " + re.escape(named) + ".*pcast"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped_over_two(grads_of(varying), True), UNSTACKED, jnp.ones(24))


def test_varying_gradients_are_averaged():
    x = np.arange(24, dtype=np.float32)
    mean = x.reshape(8, 3).mean(0)
    out = jax.jit(mapped_over_two(grads_of(("replica", "device")), True))(UNSTACKED, x)
    np.testing.assert_allclose(out["w"], mean, rtol=1e-6)
    unchecked = jax.jit(mapped_over_two(grads_of(()), False))(UNSTACKED, x)
    np.testing.assert_allclose(unchecked["w"], mean, rtol=1e-6)


# Stacked trees


STACKS = {"mesh": js.make_mesh, "virtual": js.virtual_mesh}


@pytest.mark.parametrize("kind", STACKS)
def test_leaves_without_the_replica_axis_are_all_listed(kind):
    mesh = STACKS[kind]({"replica": 4})
    tree = {"ok": jnp.ones((4, 2)), "scalar": jnp.ones(()), "other": {"x": jnp.ones((3, 4))}}
    message = r"leading axis of 4 replicas .*; got other/x \(3, 4\), scalar \(\)\."
    with pytest.raises(ValueError, match=f"consensus: .*{message}"):
        js.consensus(tree, mesh=mesh, axis_name="replica")
    with pytest.raises(ValueError, match=f"init: .*{message}"):
        js.init(js.local_sgd("replica"), tree, mesh=mesh, axis_name="replica")


# Warnings, once


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", ALL)
def test_axis_of_size_one_warns_once(name, execution):
    tx = ALL[name]("replica")
    one = jax.tree.map(lambda x: x[:1], PARAMS)
    two_traces = [lambda: trace(one_update(tx), one, execution=execution, axes={"replica": 1})] * 2
    messages = [m for m in warning_messages(*two_traces) if m.startswith(f"{name}:")]
    assert len(messages) == 1
    assert "axis 'replica' has size 1" in messages[0]
    larger = warning_messages(
        lambda: trace(one_update(ALL[name]("replica")), PARAMS, execution=execution)
    )
    assert larger == []
