"""A schedule's program gives the gradients of the model on one device, whatever lies in bubbles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from jaxslowmo.pipeline import _one_program
from support.layered import assert_close, language_model, tokens


@pytest.fixture(autouse=True)
def filled_with_nan(monkeypatch):
    """Make what no operation has written NaN, or the largest integer."""

    def nan(shape, dtype):
        is_float = jnp.issubdtype(dtype, jnp.inexact)
        return jnp.full(shape, jnp.nan if is_float else jnp.iinfo(dtype).max, dtype)

    monkeypatch.setattr(_one_program, "placeholder", nan)


def padded_with_nan(pipe, params):
    """Return stacked parameters in which NaN stands where a stage has fewer leaves."""
    held = pipe.layout.stack([{n: np.ones_like(x) for n, x in layer.items()} for layer in params])
    stacked = pipe.layout.stack(params)
    return jax.tree.map(lambda x, own: jnp.where(own == 1, x, jnp.nan), stacked, held)


def run(mesh_of, kind, stages, tied, remat):
    chunks = 2 if kind in ("interleaved", "zbv") else None
    schedule = js.schedules.by_name(kind, stages, 2 * stages, chunks)
    model, params = language_model(6, tied=tied)
    mesh = mesh_of({"stage": schedule.num_stages})
    pipe = js.pipelined(model, params, schedule, mesh=mesh, remat=remat)
    stacked = padded_with_nan(pipe, params)
    assert sum(np.isnan(x).sum() for x in stacked.values()) == pipe.layout.num_padding
    batch = tokens(2 * schedule.num_microbatches)
    values, grads = jax.jit(jax.value_and_grad(pipe, has_aux=True))(stacked, batch)
    known, expected = jax.jit(jax.value_and_grad(model, has_aux=True))(params, batch)
    assert_close((values, pipe.layout.unstack(grads)), (known, expected))
    # Of everything, padding included: a sum that was scaled or counted twice would show.
    norms = [np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(t))) for t in (grads, expected)]
    np.testing.assert_allclose(*norms, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "stages", "tied", "remat"),
    [
        ("one_f_one_b", 4, True, False),
        ("zbv", 2, False, True),
        ("interleaved", 2, True, False),
        ("lockstep", 2, False, False),
    ],
)
def test_gradients_are_those_of_the_model(mesh_of, kind, stages, tied, remat):
    run(mesh_of, kind, stages, tied, remat)


def test_branches_may_write_into_the_buffers_too(mesh_of, monkeypatch):
    """Write into buffers inside branches, as the package does for the compiler of a TPU."""
    monkeypatch.setattr(_one_program, "writes_in_branches", lambda mesh: True)
    run(mesh_of, "zero_bubble", 2, True, False)
