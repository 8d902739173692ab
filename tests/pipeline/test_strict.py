"""Pipelines under jax's debugging settings, and inside of `jax.set_mesh`."""

import optax
import pytest

import jaxslowmo as js
from support.layered import language_model, tokens
from support.strict import SETTINGS, assert_equal_bits


def program(executor, mesh):
    model, params = language_model(2)
    schedule = js.schedules.one_f_one_b(2, 2)
    pipe = js.pipelined(model, params, schedule, mesh=mesh, executor=executor)
    sync = js.slowmo("replica", base=js.local_sgd("replica", sync_every=1), sync_every=2)
    step = js.make_train_step(
        pipe, js.chain(js.clip_by_global_norm(1.0), optax.adam(0.1)), sync=sync, mesh=mesh
    )
    state = step.init(params)
    for seed in range(3):
        state, metrics = step(state, tokens(16, seed=seed))
    return metrics, step.evaluate(state, tokens(16, seed=3)), step.consensus(state)


@pytest.mark.parametrize("executor", ["one_program", "host"])
def test_a_pipeline_trains_alike(executor):
    mesh = js.make_mesh({"replica": 2, "stage": 2})
    expected = program(executor, mesh)
    with SETTINGS["set_mesh"](mesh), SETTINGS["checks"](mesh):
        assert_equal_bits(program(executor, mesh), expected)
