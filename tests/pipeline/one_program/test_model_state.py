"""Model state of layers, such as BatchNorm's statistics, in pipelines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from support.layered import assert_close

WIDTH, LAYERS = 4, 6
RANDOM = np.random.default_rng(3)


def dense(params, x):
    x = x["x"] if isinstance(x, dict) else x
    return x @ params["kernel"]


def normalized(params, x, *, state):
    """Batch normalisation that trains by the statistics so far, and counts its calls."""
    mean = 0.5 * state["mean"] + 0.5 * jnp.mean(x, 0)
    y = jnp.tanh((x - state["mean"][None]) @ params["kernel"]) + x
    return y, {"mean": mean, "count": state["count"] + 1}


def matrix():
    return {"kernel": RANDOM.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4}


def loss(x, batch):
    return jnp.mean((x - batch["x"]) ** 2), {"size": jnp.mean(x**2)}


PARAMS = [matrix() for _ in range(LAYERS)]
STATES = [
    {},
    *({"mean": np.full(WIDTH, 0.1 * i, np.float32), "count": np.int32(i)} for i in range(4)),
    {},
]
MODEL = js.LayeredModel([dense, *[normalized] * 4, dense], loss)
BATCH = {"x": RANDOM.normal(size=(16, WIDTH)).astype(np.float32)}


def one_by_one(params, states, batch, microbatches):
    """Return loss, state and gradients of the model on one device, one microbatch at a time."""

    def whole(params):
        total, now = 0.0, states
        for part in np.split(batch["x"], microbatches):
            value, (_, now) = MODEL(params, {"x": part}, model_state=now)
            total = total + value / microbatches
        return total, now

    return jax.jit(jax.value_and_grad(whole, has_aux=True))(params)


@pytest.mark.parametrize(
    ("kind", "stages", "remat", "executor"),
    [("zbv", 2, True, "one_program"), ("interleaved", 2, False, "host")],
)
def test_state_goes_on_from_microbatch_to_microbatch(mesh_of, kind, stages, remat, executor):
    chunks = 2 if kind in ("interleaved", "zbv") else None
    schedule = js.schedules.by_name(kind, stages, 4, chunks)
    options = {"remat": remat, "model_state": STATES, "executor": executor}
    pipe = js.pipelined(MODEL, PARAMS, schedule, mesh=mesh_of({"stage": stages}), **options)
    given = pipe.layout.stack(PARAMS), BATCH
    states = pipe.model_state_form(STATES)
    jit = jax.jit if executor == "one_program" else lambda fn: fn
    run = jit(jax.value_and_grad(pipe, has_aux=True))
    (value, (_, after)), grads = run(*given, model_state=states)
    (expected, known), wanted = one_by_one(PARAMS, STATES, BATCH, 4)
    assert_close(value, expected)
    assert_close(pipe.state_layout.unstack(after), known)
    assert_close(pipe.layout.unstack(grads), wanted)
    value, (_, after) = jit(pipe)(*given, model_state=states)  # forward passes alone
    assert_close((value, pipe.state_layout.unstack(after)), (expected, known))


def test_statistics_of_data_shards_are_averaged(mesh_of):
    mesh, schedule = mesh_of({"stage": 2, "data": 2}), js.schedules.one_f_one_b(2, 1)
    options = {"data_axes": "data", "model_state": STATES}
    pipe = js.pipelined(MODEL, PARAMS, schedule, mesh=mesh, **options)
    states = pipe.model_state_form(STATES)
    _, (_, after) = jax.jit(pipe)(pipe.layout.stack(PARAMS), BATCH, model_state=states)
    halves = [
        MODEL(PARAMS, {"x": part}, model_state=STATES)[1][1] for part in np.split(BATCH["x"], 2)
    ]
    mean = jax.tree.map(lambda x, y: (x + y) / 2, *halves)
    assert_close(pipe.state_layout.unstack(after), mean)
