"""Warnings point at the line of the user that they are about, however deep they are issued."""

import functools
import inspect

import jax.numpy as jnp
import optax
import pytest

import jaxslowmo as js
from jaxslowmo._support.checks import warn_once


def points_here(record: pytest.WarningsRecorder, line: int) -> bool:
    (warning,) = record
    return (warning.filename, warning.lineno) == (__file__, line)


def here() -> int:
    """The line that calls this."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_at_construction_also_called_by_the_standard_library():
    with pytest.warns(UserWarning, match="without a `base`") as record:
        js.slowmo("replica", sync_every=4)
    assert points_here(record, here() - 1)
    with pytest.warns(UserWarning, match="without a `base`") as record:
        functools.singledispatch(js.slowmo)("replica", sync_every=4)
    assert points_here(record, here() - 1)


def test_of_a_train_step_at_the_call_of_the_step():
    step = js.make_train_step(
        lambda params, batch: jnp.sum(params["w"][None] * batch),
        optax.sgd(0.1),
        sync=js.local_sgd("replica", sync_every=2),
        mesh=js.virtual_mesh({"replica": 1}),
    )
    state = step.init({"w": jnp.ones(3)})
    with pytest.warns(UserWarning, match="size 1") as record:
        step(state, jnp.ones((2, 3)))
    assert points_here(record, here() - 1)


def test_once_for_each_message():
    warn = warn_once()
    with pytest.warns(UserWarning, match="[ab]") as record:
        list(map(warn, ["a", "b", "a"]))
    assert [str(w.message) for w in record] == ["a", "b"]
