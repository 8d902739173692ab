"""A schedule's program gives the gradients of the model on one device, whatever lies in bubbles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from jaxslowmo.pipeline.one_program import _one_program, _tick_table
from support.exhaustive import sweep
from support.layered import assert_gradients_alike, language_model, tokens

schedules = js.schedules
SAMPLE = {
    "1f1b": (schedules.one_f_one_b(4, 8), 6, True, False),
    "gpipe": (schedules.gpipe(2, 4), 2, False, True),
    "zb_h1": (schedules.zero_bubble(2, 4), 2, True, False),
    "interleaved": (schedules.interleaved(2, 4, 2), 6, True, True),
    "zbv": (schedules.zbv(2, 4), 6, False, False),
    "lockstep": (schedules.lockstep(4, 6), 6, True, False),
}


@pytest.fixture
def filled_with_nan(monkeypatch):
    """What no operation has written is NaN, or the largest integer."""

    def nan(shape, dtype):
        is_float = jnp.issubdtype(dtype, jnp.inexact)
        return jnp.full(shape, jnp.nan if is_float else jnp.iinfo(dtype).max, dtype)

    monkeypatch.setattr(_tick_table, "empty", nan)


def padded_with_nan(pipe, params):
    """Stacked parameters in which NaN stands where a stage has fewer leaves."""
    held = pipe.layout.stack([{n: np.ones_like(x) for n, x in layer.items()} for layer in params])
    stacked = pipe.layout.stack(params)
    return jax.tree.map(lambda x, own: jnp.where(own == 1, x, jnp.nan), stacked, held)


def run(mesh_of, schedule, num_blocks, tied, remat):
    model, params = language_model(num_blocks, tied=tied)
    mesh = mesh_of({"stage": schedule.num_stages})
    pipe = js.pipelined(model, params, schedule, mesh=mesh, remat=remat)
    batch = tokens(2 * schedule.num_microbatches)
    stacked = padded_with_nan(pipe, params)
    assert sum(np.isnan(x).sum() for x in stacked.values()) == pipe.layout.num_padding
    assert_gradients_alike(pipe, model, params, batch, stacked)


@pytest.mark.parametrize("case", sweep(SAMPLE, lambda case: case in ("1f1b", "interleaved", "zbv")))
@pytest.mark.usefixtures("filled_with_nan")
def test_gradients_are_those_of_the_model(mesh_of, case):
    run(mesh_of, *SAMPLE[case])


@pytest.mark.usefixtures("filled_with_nan")
def test_branches_may_write_into_the_buffers_too(mesh_of, monkeypatch):
    """As they do where the compiler is that of a TPU."""
    monkeypatch.setattr(_one_program, "writes_in_branches", lambda mesh: True)
    run(mesh_of, *SAMPLE["zb_h1"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", schedules.KINDS)
@pytest.mark.usefixtures("filled_with_nan")
def test_gradients_of_every_kind(mesh_of, kind, num_stages, tied, remat):
    num_chunks = 2 if kind in ("interleaved", "zbv") else None
    schedule = schedules.by_name(kind, num_stages, 2 * num_stages, num_chunks)
    run(mesh_of, schedule, 14, tied, remat)
