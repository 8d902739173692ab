"""PRNG keys: no two devices, replicas, microbatches or updates draw the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.meshes import MESHES

PARAMS = {"w": np.ones(64, np.float32)}
AVERAGE = js.local_sgd("replica")
BATCH = np.ones((8, 1), np.float32)


def step_of(fn, mesh, sync=AVERAGE, **options):
    return js.make_train_step(fn, optax.sgd(0.1), sync=sync, mesh=mesh, **options)


@pytest.mark.parametrize(
    ("axes", "axis_name", "kind"),
    [
        ({"replica": 2, "a": 2, "b": 2}, "replica", "virtual"),
        ({"node": 2, "replica": 2, "device": 2}, ("node", "replica"), "auto"),
    ],
)
def test_no_two_draws_of_a_run_have_one_key(axes, axis_name, kind):
    """Over replicas, devices, microbatches, batches of a window and updates; of state and step."""
    inside = tuple(a for a in axes if a not in ("node", "replica"))
    seen = []

    def record(words):
        seen.append(np.asarray(words).tobytes())

    def drawn(params, batch, *, rng, model_state):
        of_state = jax.random.fold_in(model_state["key"], model_state["count"])
        for key in (of_state, rng):
            jax.debug.callback(record, jax.random.key_data(key))
        after = {**model_state, "count": model_state["count"] + 1}
        return jnp.mean(params["w"]) * batch.mean(), ({}, after)

    step = js.make_train_step(
        drawn,
        optax.sgd(0.1),
        sync=js.local_sgd(axis_name),
        gradients=js.all_reduce_gradients(inside),  # so each device has examples of its own
        mesh=MESHES[kind](axes),
        axis_name=axis_name,
        accumulate=2,
    )
    start = {"key": jax.random.key(5), "count": jnp.uint32(0)}
    state, batch = step.init(PARAMS, model_state=start), np.ones((16, 1), np.float32)
    for _ in range(2):
        window, _ = step.collect(state, batch)
        state, _ = step(state, batch, window=window)
    jax.block_until_ready(state)
    jax.effects_barrier()
    # Two keys for each of 8 devices, in 2 updates of 2 batches of 2 microbatches.
    assert len(seen) == 2 * 8 * 8
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_without_a_type_are_told_of_every_generator(impl):
    """Some have four words. All replicas draw alike from raw ones; typed ones become their own."""

    def draws(params, batch, *, rng, model_state):
        noise = jax.random.uniform(model_state["key"])
        after = {"key": jax.random.split(model_state["key"])[0]}
        return jnp.sum(params["w"]), ({"noise": noise, "own": jax.random.uniform(rng)}, after)

    with jax.default_prng_impl(impl):
        step, raw = step_of(draws, js.make_mesh({"replica": 4}), "none"), jax.random.PRNGKey(3)
        with pytest.warns(UserWarning, match="`model_state`: key .*jax.random.wrap_key_data"):
            state = step.init(PARAMS, model_state={"key": raw})
        assert len(np.unique(step(state, BATCH)[1]["noise"])) == 1  # what the warning says
        state = step.init(PARAMS, model_state={"key": jax.random.wrap_key_data(raw)})
        assert str(jax.random.key_impl(state.model_state["key"])) == impl
        for _ in range(2):
            state, metrics = step(state, BATCH)
            assert len(np.unique(metrics["noise"])) == len(np.unique(metrics["own"])) == 4
    if impl == "rbg":  # whose draws are others under vmap
        key = {"key": jax.random.key(0, impl=impl)}
        step_of(draws, js.make_mesh({"replica": 2})).init(PARAMS, model_state=key)
        virtual = step_of(draws, js.virtual_mesh({"replica": 2}))
        with pytest.warns(UserWarning, match="'rbg' .* virtual mesh"):
            virtual.init(PARAMS, model_state=key)
        virtual.init(PARAMS, model_state=key)  # once
    step = step_of(draws, js.virtual_mesh({"replica": 1}), "none")
    step.init(PARAMS, model_state={"key": raw})  # warnings are errors
