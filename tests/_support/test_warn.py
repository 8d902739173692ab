"""Warnings point at the line of the user that they are about, however deep they are issued."""

import contextlib
import functools
import inspect
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo._support.checks import warn_once, warn_user

PARAMS = {"w": jnp.ones((1, 3))}


def points_here(record: pytest.WarningsRecorder, line: int) -> bool:
    (warning,) = record
    return (warning.filename, warning.lineno) == (__file__, line)


def here() -> int:
    """The line that calls this."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_at_construction():
    with pytest.warns(UserWarning, match="without a `base`") as record:
        js.slowmo("replica", sync_every=4)
    assert points_here(record, here() - 1)


def test_at_construction_called_by_the_standard_library():
    with pytest.warns(UserWarning, match="without a `base`") as record:
        functools.singledispatch(js.slowmo)("replica", sync_every=4)
    assert points_here(record, here() - 1)
    stack = contextlib.ExitStack()
    stack.callback(js.slowmo, "replica", sync_every=4)
    with pytest.warns(UserWarning, match="without a `base`") as record:
        stack.close()
    assert points_here(record, here() - 1)


@pytest.mark.parametrize("execution", ["jit(shard_map)", "vmap"])
@pytest.mark.parametrize("chained", [False, True])
def test_at_trace_time(mesh_of, execution, chained):
    sync = js.local_sgd("replica", sync_every=2)
    tx = optax.chain(optax.sgd(0.1), sync) if chained else sync
    lines = []

    def step(params):
        lines.append(here() + 1)
        return tx.update(params, tx.init(params), params)[0]

    if execution == "vmap":
        mapped = jax.vmap(step, axis_name="replica")
    else:
        spec = P("replica")
        mapped = jax.jit(
            jax.shard_map(step, mesh=mesh_of({"replica": 1}), in_specs=spec, out_specs=spec)
        )
    with pytest.warns(UserWarning, match="size 1") as record:
        mapped(PARAMS)
    assert points_here(record, lines[0])


def test_of_a_train_step_at_the_call_of_the_step():
    step = js.make_train_step(
        lambda params, batch: jnp.sum(params["w"] * batch),
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


def test_where_no_line_is_of_a_user(monkeypatch):
    """As in a program that is part of the library: its outermost line will do."""

    class Everything:
        def __contains__(self, name):
            return True

    monkeypatch.setattr("jaxslowmo._support.checks._NOT_THE_USER", Everything())
    with pytest.warns(UserWarning, match="hello") as record:
        warn_user("hello")
    (warning,) = record
    assert warning.filename == outermost().f_code.co_filename


def outermost() -> types.FrameType:
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None:
        frame = frame.f_back
    return frame
