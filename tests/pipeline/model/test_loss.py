"""Losses that are quotients of sums: equal however examples are divided."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.layered import assert_close, block, embed, head, language_model, tokens

_, PARAMS = language_model(2)


def masked(logits, batch):
    own = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["next"][:, None], 1)[:, 0]
    right = (jnp.argmax(logits, -1) == batch["next"]).astype(jnp.int32) * batch["mask"]
    count = jnp.sum(batch["mask"])
    own *= batch["mask"].astype(own.dtype)
    return (-jnp.sum(own), count), {"right": (jnp.sum(right), count)}


TIED = ((0, "table"), (3, "table"))
MODEL = js.LayeredModel([embed, block, block, head], masked, tied=[TIED])


def examples(count, seed=0):
    mask = np.random.default_rng(seed).random(count) < np.linspace(0.1, 0.9, count)
    return {**tokens(count, seed), "mask": mask.astype(np.int32)}


RATE = 0.5
SHAPES = {
    "one stage": ({"replica": 2, "stage": 1}, "replica", ()),
    "parts by the pipeline": ({"replica": 2, "stage": 2, "data": 2}, "replica", ("data",)),
    "parts by the step": ({"replica": 2, "stage": 2, "data": 2}, ("replica", "data"), ("data",)),
    "parts the pipeline ignores": ({"replica": 2, "stage": 2, "data": 2}, ("replica", "data"), ()),
}


def quotient(params, batch):
    """The loss of all examples at once, in plain jax; the head has the table of the embedding."""
    x = embed(params[0], batch)
    for own in params[1:3]:
        x = block(own, x)
    (total, count), _ = masked(head({**params[3], "table": params[0]["table"]}, x), batch)
    return total / count.astype(total.dtype)


def stepped(params, batch):
    grads = jax.grad(quotient)(params, batch)
    first, *rest = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    return [first, *rest[:2], {**rest[2], "table": first["table"]}]


def joined(batches):
    return jax.tree.map(lambda *x: np.concatenate(x), *batches)


def pipes(name, executor, mesh):
    axes = SHAPES[name][2]
    schedule = js.schedules.one_f_one_b(mesh.shape["stage"], 2)
    specs = None
    if name == "parts by the pipeline":  # which gathers over these axes, so that it maps them
        specs = jax.tree.map(lambda x: P("data") if x.shape[0] % 2 == 0 else P(), PARAMS)
    return js.pipelined(
        MODEL, PARAMS, schedule, mesh=mesh, data_axes=axes, executor=executor, param_specs=specs
    )


@pytest.mark.parametrize(
    ("name", "executor", "accumulate", "num_batches"),
    [
        ("one stage", "one_program", 1, 1),
        ("parts by the pipeline", "one_program", 2, 3),
        ("parts by the step", "host", 2, 2),
        ("parts the pipeline ignores", "one_program", 2, 1),
    ],
)
def test_steps_have_the_quotient_of_the_whole_batch(
    mesh_of, name, executor, accumulate, num_batches
):
    sizes, over, _ = SHAPES[name]
    mesh = mesh_of(sizes)
    step = js.make_train_step(
        pipes(name, executor, mesh),
        optax.sgd(RATE),
        gradients=js.all_reduce_gradients(over),
        mesh=mesh,
        accumulate=accumulate,
    )
    state, window = step.init(PARAMS), None
    batches = [examples(16, seed) for seed in range(num_batches)]
    batches[0]["mask"][:4] = 0
    for batch in batches[:-1]:
        window, _ = step.collect(state, batch, window=window)
    state, metrics = step(state, batches[-1], window=window)
    assert_close(step.consensus(state), stepped(PARAMS, joined(batches)))
    assert_close(js.host_mean(metrics)["loss"], quotient(PARAMS, batches[-1]))
    assert_close(np.sum(metrics["loss_weight"]), np.float32(batches[-1]["mask"].sum()))
