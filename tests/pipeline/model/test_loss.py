"""Losses that are quotients of sums: equal however examples are divided."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.layered import assert_close, block, embed, head, language_model, tokens

_, PARAMS = language_model(2)


def masked(logits, batch):
    own = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["next"][:, None], 1)[:, 0]
    right = (jnp.argmax(logits, -1) == batch["next"]) * batch["mask"]
    count = jnp.sum(batch["mask"])
    return (-jnp.sum(own * batch["mask"]), count), {"right": (jnp.sum(right), count)}


MODEL = js.LayeredModel([embed, block, block, head], masked, tied=[((0, "table"), (3, "table"))])


def examples(count, seed=0):
    mask = np.random.default_rng(seed).random(count) < np.linspace(0.1, 0.9, count)
    return {**tokens(count, seed), "mask": mask.astype(np.int32)}


def check(pipe, model, *batches):
    run = jax.value_and_grad(pipe, has_aux=True)
    run = run if isinstance(pipe, js.pipeline.HostPipeline) else jax.jit(run)
    alone = jax.jit(jax.value_and_grad(model, has_aux=True))
    for batch in batches:
        found, grads = run(pipe.layout.stack(PARAMS), batch)
        known, expected = alone(PARAMS, batch)
        assert_close((found, pipe.layout.unstack(grads)), (known, expected))
    return found, grads


@pytest.mark.parametrize("executor", ["one_program", "host"])
def test_gradients_depend_neither_on_microbatches_nor_on_data_axes(mesh_of, executor):
    schedule, mesh = js.schedules.zero_bubble(2, 8), mesh_of({"stage": 2, "data": 2})
    pipe = js.pipelined(MODEL, PARAMS, schedule, mesh=mesh, data_axes="data", executor=executor)
    batch = examples(32)
    value, grads = check(pipe, MODEL, batch, {**batch, "mask": np.zeros(32, np.int32)})
    # Examples that all are masked weigh nothing.
    assert_close(value, (0.0, {"right": 0.0}))
    assert not any(np.any(x) for x in jax.tree.leaves(grads))


@pytest.mark.parametrize("executor", ["one_program", "host"])
def test_leaves_that_examples_share_reach_every_microbatch_whole(mesh_of, executor):
    def first(params, batch):
        return {"x": embed(params, batch), "scale": batch["scale"], "bias": batch["bias"]}

    def second(params, x):
        return {**x, "x": block(params, x["x"] * x["scale"] + x["bias"][0])}

    model = js.LayeredModel([first, second, second, lambda p, x: head(p, x["x"])], masked)
    shared = {"scale": np.float32(0.5), "bias": np.ones((1, 4), np.float32)}
    mesh, schedule = mesh_of({"stage": 2, "data": 2}), js.schedules.one_f_one_b(2, 4)
    pipe = js.pipelined(model, PARAMS, schedule, mesh=mesh, data_axes="data", executor=executor)
    check(pipe, model, {**examples(16), **shared})


def test_a_host_pipeline_divides_by_the_weight_of_each_replica(mesh_of):
    mesh = mesh_of({"replica": 2, "stage": 2})
    schedule = js.schedules.one_f_one_b(2, 4)
    pipe = js.pipelined(MODEL, PARAMS, schedule, mesh=mesh, executor="host")
    step = js.make_train_step(pipe, optax.sgd(1.0), sync="none", mesh=mesh)
    batch, alone = examples(32), jax.jit(jax.value_and_grad(MODEL, has_aux=True))
    state, metrics = step(step.init(PARAMS), batch)
    for r in range(2):
        own = jax.tree.map(lambda x, r=r: x[16 * r : 16 * r + 16], batch)
        (loss, more), grads = alone(PARAMS, own)
        of_replica = jax.tree.map(lambda x, r=r: np.asarray(x)[r], (metrics, state.params))
        assert_close(of_replica[0], {"loss": loss, **more})
        moved = jax.tree.map(np.subtract, PARAMS, grads)
        assert_close(pipe.layout.unstack(of_replica[1]), moved)
