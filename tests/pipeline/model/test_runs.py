"""Equal layers in a row are one loop: same losses, and programs that do not grow with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from jaxslowmo.pipeline.model import Run
from jaxslowmo.pipeline.model._layered import runs_of
from support.layered import assert_close, assert_gradients_alike, language_model, tokens


def test_rows_of_equal_layers_of_equal_parameters_are_runs():
    f, g = (lambda p, x: x), (lambda p, x: x + 1)
    layers = [f, f, f, f, f, g, g, f]
    assert runs_of(layers, [0] * 8, 0, 8) == (Run(0, 5), Run(5, 1), Run(6, 1), Run(7, 1))
    assert runs_of(layers, [0, 1, 1, 1, 1, 0, 0, 0], 0, 5) == (Run(0, 1), Run(1, 4))
    assert runs_of(layers, [0] * 8, 2, 4) == (Run(2, 1), Run(3, 1))


def pipeline(mesh_of, model, params, stages=2, **options):
    schedule = js.schedules.one_f_one_b(stages, 4)
    return js.pipelined(model, params, schedule, mesh=mesh_of({"stage": stages}), **options)


@pytest.mark.parametrize("remat", [False, True])
def test_gradients_of_runs_are_those_of_the_model(mesh_of, remat):
    model, params = language_model(10)
    pipe = pipeline(mesh_of, model, params, remat=remat)
    assert pipe.layout.runs(1) == (Run(6, 5), Run(11, 1))
    assert_gradients_alike(pipe, model, params, tokens(8), pipe.layout.stack(params))


def test_a_run_that_changes_the_type_of_what_it_is_given_is_written_out(mesh_of):
    layers = [lambda p, x: jnp.concatenate([x, x], -1) * p["w"]] * 8
    model = js.LayeredModel(layers, lambda x, batch: jnp.mean(x))
    parts = [[(0, 4)], [(4, 8)]]
    params = [{"w": np.float32(i + 1)} for i in range(8)]
    pipe = pipeline(mesh_of, model, params, parts=parts)
    assert pipe.layout.runs(0) == (Run(0, 4),)
    batch = np.random.default_rng(0).normal(size=(8, 1)).astype(np.float32)
    assert_close(jax.jit(pipe.loss_fn)(pipe.layout.stack(params), batch), model(params, batch))


def test_layers_of_a_run_draw_their_own_keys(mesh_of):
    def noisy(params, x, *, key):
        return x + params["w"] * jax.random.normal(key, x.shape)

    model = js.LayeredModel([noisy] * 8, lambda x, batch: jnp.mean(x))
    params = [{"w": np.float32(i + 1)} for i in range(8)]
    batch, key = np.zeros((4, 3), np.float32), jax.random.key(3)
    pipe = pipeline(mesh_of, model, params)
    found = jax.jit(pipe.loss_fn)(pipe.layout.stack(params), batch, rng=key)
    each = [model(params, batch[m : m + 1], rng=jax.random.fold_in(key, m)) for m in range(4)]
    assert_close(found, sum(each) / 4)


def test_programs_do_not_grow_with_equal_layers(mesh_of):
    def length(blocks):
        model, params = language_model(blocks)
        pipe = pipeline(mesh_of, model, params)
        step = jax.jit(jax.value_and_grad(pipe.loss_fn, has_aux=True))
        return len(step.lower(pipe.layout.stack(params), tokens(8)).as_text().splitlines())

    assert length(30) == length(10)
