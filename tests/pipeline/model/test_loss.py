"""Losses that are quotients of sums: equal however examples are divided; and what is no loss."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.pipeline.model import LossTerms
from jaxslowmo.pipeline.model._calls import loss_terms
from support.exhaustive import sweep
from support.layered import assert_close, block, embed, head, language_model, tokens

_, PARAMS = language_model(2)
TIED = [((0, "table"), (3, "table"))]


def masked(logits, batch):
    own = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["next"][:, None], 1)[:, 0]
    right = (jnp.argmax(logits, -1) == batch["next"]) * batch["mask"]
    count = jnp.sum(batch["mask"])
    return (-jnp.sum(own * batch["mask"]), count), {"right": (jnp.sum(right), count)}


MODEL = js.LayeredModel([embed, block, block, head], masked, tied=TIED)


def examples(count, seed=0):
    mask = np.random.default_rng(seed).random(count) < np.linspace(0.1, 0.9, count)
    return {**tokens(count, seed), "mask": mask.astype(np.int32)}


@pytest.mark.parametrize(
    ("kind", "stages", "microbatches", "data"),
    sweep(
        [
            (k, s, m, d)
            for k in ("gpipe", "zero_bubble", "one_f_one_b")
            for s in (1, 2)
            for m in (2, 8)
            for d in (1, 2)
        ],
        lambda k, s, m, d: (k, s, m, d) in [("gpipe", 1, 2, 2), ("zero_bubble", 2, 8, 2)],
    ),
)
def test_gradients_depend_neither_on_microbatches_nor_on_data_axes(
    mesh_of, kind, stages, microbatches, data
):
    mesh = mesh_of({"stage": stages, "data": data})
    schedule = js.schedules.by_name(kind, stages, microbatches)
    pipe = js.pipelined(MODEL, PARAMS, schedule, mesh=mesh, data_axes="data")
    batch = examples(32)
    found, grads = jax.jit(jax.value_and_grad(pipe, has_aux=True))(pipe.layout.stack(PARAMS), batch)
    known, expected = jax.value_and_grad(MODEL, has_aux=True)(PARAMS, batch)
    assert_close(found, known)
    assert_close(pipe.layout.unstack(grads), expected)


@pytest.mark.parametrize("data_axes", [(), ("data",)])
def test_steps_train_as_without_stages(mesh_of, data_axes):
    mesh = mesh_of({"replica": 2, "stage": 2, "data": 2})
    pipe = js.pipelined(
        MODEL, PARAMS, js.schedules.one_f_one_b(2, 4), mesh=mesh, data_axes=data_axes
    )
    inner = js.virtual_mesh({"replica": 2} if data_axes else {"replica": 2, "data": 2})

    def trained(loss_fn, mesh):
        sync = js.local_sgd("replica", sync_every=2)
        step = js.make_train_step(loss_fn, optax.adam(0.01, eps=1e-2), sync=sync, mesh=mesh)
        state = step.init(PARAMS)
        for i in range(4):
            state, metrics = step(state, examples(32, i))
        return state.params, metrics

    (found, metrics), known = trained(pipe, mesh), trained(MODEL, inner)
    assert_close((pipe.layout.unstack_like(found), metrics), known)


def test_examples_that_all_are_masked_weigh_nothing(mesh_of):
    pipe = js.pipelined(MODEL, PARAMS, js.schedules.gpipe(2, 2), mesh=mesh_of({"stage": 2}))
    batch = {**tokens(4), "mask": np.zeros(4, np.int32)}
    found, grads = jax.jit(jax.value_and_grad(pipe, has_aux=True))(pipe.layout.stack(PARAMS), batch)
    assert_close(found, (0.0, {"right": 0.0}))
    assert not any(np.any(x) for x in jax.tree.leaves(grads))
    assert_close(MODEL(PARAMS, batch), (0.0, {"right": 0.0}))


def test_a_host_pipeline_divides_by_the_weight_of_each_replica(mesh_of):
    mesh = mesh_of({"replica": 2, "stage": 2})
    schedule = js.schedules.one_f_one_b(2, 4)
    pipe = js.pipelined(MODEL, PARAMS, schedule, mesh=mesh, executor="host")
    step = js.make_train_step(pipe, optax.sgd(1.0), sync="none", mesh=mesh)
    batch = examples(32)
    state, metrics = step(step.init(PARAMS), batch)
    for r in range(2):
        own = jax.tree.map(lambda x, r=r: x[16 * r : 16 * r + 16], batch)
        (loss, more), grads = jax.value_and_grad(MODEL, has_aux=True)(PARAMS, own)
        of_replica = jax.tree.map(lambda x, r=r: np.asarray(x)[r], (metrics, state.params))
        assert_close(of_replica[0], {"loss": loss, **more})
        moved = jax.tree.map(np.subtract, PARAMS, grads)
        assert_close(pipe.layout.unstack(of_replica[1]), moved)


def test_leaves_that_examples_share_reach_every_microbatch_whole(mesh_of):
    def scaled(params, x):
        return block(params, x["x"] * x["scale"] + x["bias"][0]), x["scale"], x["bias"]

    def first(params, batch):
        return {"x": embed(params, batch), "scale": batch["scale"], "bias": batch["bias"]}

    def second(params, x):
        y, *rest = scaled(params, x)
        return {"x": y, "scale": rest[0], "bias": rest[1]}

    def last(params, x):
        return head(params, x["x"])

    model = js.LayeredModel([first, second, second, last], masked)
    shared = {"scale": np.float32(0.5), "bias": np.ones((1, 4), np.float32)}
    batch = {**examples(16), **shared}
    mesh = mesh_of({"stage": 2, "data": 2})
    pipe = js.pipelined(model, PARAMS, js.schedules.one_f_one_b(2, 4), mesh=mesh, data_axes="data")
    found, grads = jax.jit(jax.value_and_grad(pipe, has_aux=True))(pipe.layout.stack(PARAMS), batch)
    known, expected = jax.value_and_grad(model, has_aux=True)(PARAMS, batch)
    assert_close((found, pipe.layout.unstack(grads)), (known, expected))


def test_terms_of_all_forms():
    one = jnp.ones(())
    assert loss_terms(one) == LossTerms(one, None, None)
    assert loss_terms((one, {"a": one})) == LossTerms(one, None, {"a": one})
    terms = loss_terms((one, 2))
    assert (terms.weight, terms.weight.dtype, terms.metrics) == (2, jnp.float32, None)
    assert loss_terms((one, 2)).value(7) == 0.5
    assert loss_terms((one, {"a": (one, 4)})).value(2) == (0.5, {"a": 0.25})


@pytest.mark.parametrize(
    "value",
    [
        jnp.ones(2),
        (jnp.ones(()), jnp.ones(2)),
        (jnp.ones(()), jnp.ones(()), jnp.ones(())),
        (jnp.ones(()), {"a": jnp.ones(2)}),
        {"loss": jnp.ones(())},
        "loss",
    ],
)
def test_what_is_no_loss_is_refused(value):
    with pytest.raises(ValueError, match=re.escape("`loss` must return a scalar, (sum, weight)")):
        loss_terms(value)
