"""What the training step refuses, and how it says so."""

import numpy as np
import optax
import pytest
from jax import numpy as jnp

import jaxslowmo as js

PARAMS = {"b": np.zeros(3, np.float32), "w": np.ones((8, 3), np.float32)}
BATCH = np.ones((32, 8), np.float32)
KINDS = {"devices": js.make_mesh, "virtual": js.virtual_mesh}


def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "eager"}, r'`mode` must be "traced" or "host", got \'eager\''),
        ({"model_state": "mean"}, r"`model_state` must be .* got 'mean'"),
        ({"host_batch": "whole"}, r'`host_batch` must be "local" or "global", got \'whole\''),
        ({"accumulate": True}, r"`accumulate` counts microbatches and must be >= 1, got True"),
        ({"accumulate": 0}, r"`accumulate` counts microbatches and must be >= 1, got 0"),
        ({"accumulate": 1.5}, r"`accumulate` .* got 1\.5"),
        ({"sync": optax.sgd(0.1)}, r"`sync` must be a js\.ParameterTransform .* got Gradient\w+"),
        ({"sync": "all"}, r"`sync` must be .*None, or \"none\" for .* independently, got 'all'"),
        (
            {"sync": "none", "model_state": "broadcast"},
            r'`sync`="none" .*`model_state`="broadcast" .*leave one',
        ),
        ({"gradients": js.local_sgd("replica")}, r"`gradients` must .* pass it as `sync`"),
        ({"loss_fn": 3}, r"`loss_fn` must be callable, got int"),
    ],
)
def test_bad_arguments(arguments, message):
    given = {"loss_fn": loss, "mesh": js.virtual_mesh({"replica": 2}), **arguments}
    with pytest.raises(ValueError, match=message):
        js.make_train_step(given.pop("loss_fn"), optax.sgd(0.1), **given)


def over(name):
    return js.slowmo("replica", base=js.local_sgd(name, sync_every=1), sync_every=2)


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        (js.local_sgd("replcia"), r"over \['replcia'\], and `mesh` has the axes \['replica'"),
        (js.sgp("replcia"), r"over \['replcia'\]"),
        (over("replcia"), r"over \['replcia'\]"),
        (js.only_finite(over("replcia")), r"over \['replcia'\]"),
        (js.local_sgd("replica", local_axis_name="host"), r"over \['host'\]"),
        (js.only_finite(js.diloco("replica", local_axis_name="host")), r"over \['host'\]"),
        (js.local_sgd("device"), r"over \['device'\], .* `axis_name`='replica': .* independently"),
    ],
)
def test_axes_of_sync_are_checked_at_construction(sync, message):
    mesh = js.virtual_mesh({"replica": 2, "device": 2})
    with pytest.raises(ValueError, match=f"`sync` exchanges {message}"):
        js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=mesh)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda p, b: p["b"], r"scalar loss, .* got \(3,\)"),
        (lambda p, b: (loss(p, b), [1.0]), r"scalar loss, .* got \(\(\), \[\(\)\]\)"),
        (lambda p, b: (loss(p, b), {}, {}), r"must return a scalar loss"),
    ],
)
def test_bad_results_of_the_loss(bad, message):
    mesh = js.virtual_mesh({"replica": 2})
    step = js.make_train_step(bad, optax.sgd(0.1), sync="none", mesh=mesh)
    with pytest.raises(ValueError, match=message):
        step(step.init(PARAMS), BATCH)


def test_hook_state_that_differs_inside_a_replica():
    both = ("replica", "device")
    options = {
        "gradients": js.all_reduce_gradients(both, hook=js.hooks.int8()),
        "mesh": js.make_mesh({"replica": 2, "device": 2}),
    }
    step = js.make_train_step(loss, optax.sgd(0.1), **options)
    message = r"init: `tx` keeps state that differs .*hook.*\['device'\].* all in `axis_name`"
    with pytest.raises(ValueError, match=message):
        step.init(PARAMS)
    step = js.make_train_step(loss, optax.sgd(0.1), axis_name=both, **options)
    state, _ = step(step.init(PARAMS), BATCH)
    assert np.isfinite(state.params["w"]).all()


def test_a_loss_function_may_refuse_to_run():
    def loss(params, batch):
        return jnp.mean((params["w"] - batch) ** 2)

    out_of_date = []

    def before_run():
        if out_of_date:
            raise ValueError("the program is out of date")

    loss.before_run = before_run
    mesh = js.virtual_mesh({"replica": 2})
    step = js.make_train_step(loss, optax.sgd(0.1), sync=js.local_sgd("replica"), mesh=mesh)
    state, _ = step(step.init({"w": jnp.ones(3)}), jnp.zeros((2, 3)))
    out_of_date.append(True)
    for run in (step, step.evaluate, step.collect):
        with pytest.raises(ValueError, match="out of date"):
            run(state, jnp.zeros((2, 3)))
    out_of_date.clear()
    step(state, jnp.zeros((2, 3)))
