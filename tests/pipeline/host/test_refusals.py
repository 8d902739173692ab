"""What the host executor refuses."""

from typing import Any

import jax
import optax
import pytest

import jaxslowmo as js
from support.layered import language_model, tokens

ONE_F_ONE_B = js.schedules.one_f_one_b(2, 2)


class TestHostAlone:
    """What the host executor refuses, and what it holds."""

    model, params = language_model(2)

    def pipe(self, **options: Any) -> Any:
        mesh = options.pop("mesh", None) or js.make_mesh({"replica": 2, "stage": 2})
        return js.pipelined(
            self.model, self.params, ONE_F_ONE_B, mesh=mesh, executor="host", **options
        )

    def test_it_stays_outside_of_programs(self) -> None:
        pipe = self.pipe()
        for wrapped in (jax.jit(pipe), jax.vmap(pipe, (None, 0))):
            with pytest.raises(ValueError, match=r"`executor`=\"host\" dispatches .* jax\.jit"):
                wrapped(self.params, jax.tree.map(lambda x: x.reshape(2, 8), tokens(16)))
        step = js.make_train_step(pipe, optax.sgd(0.1), sync="none", mesh=pipe.mesh)
        state = step.init(self.params)
        with pytest.raises(ValueError, match=r"cannot be called inside of jax\.jit"):
            jax.jit(step)(state, tokens(16))
        for mesh in (js.make_mesh({"replica": 2}), js.virtual_mesh({"replica": 2})):
            with pytest.raises(ValueError, match="`mesh` must be the mesh of the pipeline"):
                js.make_train_step(pipe, optax.sgd(0.1), sync="none", mesh=mesh)

    def test_line_searches_are_refused(self) -> None:
        mesh, schedule = js.make_mesh({"replica": 2, "stage": 1}), js.schedules.gpipe(1, 2)
        pipe = js.pipelined(self.model, self.params, schedule, mesh=mesh, executor="host")

        def asking(updates: Any, state: Any, params: Any = None, *, value_fn: Any, **_: Any) -> Any:
            return jax.tree.map(lambda g: -g * value_fn(params), updates), state

        searching = optax.GradientTransformationExtraArgs(lambda params: (), asking)
        step = js.make_train_step(pipe, searching, sync="none", mesh=pipe.mesh)
        with pytest.raises(ValueError, match=r"`value_fn`.* `executor`=\"host\""):
            step(step.init(self.params), tokens(16))

    def test_devices_of_other_processes_are_refused(self, monkeypatch: Any) -> None:
        mesh = js.make_mesh({"stage": 2})
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        with pytest.raises(ValueError, match="dispatches every operation from one process"):
            self.pipe(mesh=mesh)

    def test_other_executors_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r'`executor` must be "one_program" or "host", got 1'):
            js.pipelined(self.model, self.params, ONE_F_ONE_B, mesh=None, executor=1)  # type: ignore
