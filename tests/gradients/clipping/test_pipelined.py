"""The norm of a pipeline's parameters, tied ones among them, is that of the model on one device."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.gradients.clipping import clip_state
from support.exhaustive import sweep
from support.layered import assert_close, block, embed, head, language_model, loss, tokens

MAX_NORM, STEPS = 2.0, 3
MODEL, PARAMS = language_model(2)
BATCHES = [tokens(16, seed) for seed in range(STEPS)]


def on_one_device(params, batch):
    """With one table, not two that are told to be equal."""
    x = embed(params[0], batch)
    for own in params[1:]:
        x = block(own, x)
    return loss(head(params[0], x), batch)[0]


@pytest.fixture(scope="module")
def expected():
    params, norms = PARAMS[:-1], []
    optimizer = optax.chain(js.clip_by_global_norm(MAX_NORM), optax.adam(0.05))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        updates, state = optimizer.update(jax.grad(on_one_device)(params, batch), state)
        return optax.apply_updates(params, updates), state

    for batch in BATCHES:
        params, state = step(params, state, batch)
        norms.append(clip_state(state).norm)
    assert min(norms) < MAX_NORM < max(norms)
    return params, norms


@pytest.mark.parametrize(
    ("fsdp", "validate", "is_scaled"),
    sweep(
        [(f, v, s) for f in (1, 2) for v in ("before", "after") for s in (False, True)],
        lambda fsdp, validate, is_scaled: (fsdp, validate, is_scaled) == (2, "after", True),
    ),
)
def test_clipped_pipelines_train_as_one_device(expected, fsdp, validate, is_scaled):
    mesh = js.make_mesh({"replica": 2, "stage": 2} | ({"fsdp": 2} if fsdp > 1 else {}))
    specs = jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), "fsdp"), PARAMS)
    options = {"data_axes": ("fsdp",), "param_specs": specs} if fsdp > 1 else {}
    schedule = js.schedules.one_f_one_b(2, 2)
    pipe = js.pipelined(MODEL, PARAMS, schedule, mesh=mesh, **options)
    clip = js.clip_by_global_norm(MAX_NORM, counted=pipe.layout.counted)
    optimizer = js.chain(clip, optax.adam(0.05))
    if is_scaled:
        optimizer = js.dynamic_loss_scale(optimizer, initial=8.0)
    whole = js.chain(js.all_reduce_gradients("replica"), optimizer)
    step = js.make_train_step(pipe.loss_fn, whole, mesh=mesh, validate=validate)
    state, norms = step.init(pipe.layout.stack(PARAMS)), []
    for batch in BATCHES:
        state, _ = step(state, batch)
        norms.append(np.asarray(clip_state(state.opt_state).norm))
    np.testing.assert_allclose(norms, np.stack([expected[1]] * 2, 1), rtol=1e-5)
    found = pipe.layout.unstack(jax.tree.map(lambda x: np.asarray(x)[0], state.params))
    assert_close(found[:-1], expected[0])
    np.testing.assert_array_equal(found[-1]["table"], found[0]["table"])
