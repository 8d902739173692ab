"""A module as a function of its parameters and its other tensors."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.core import Tracer

from ..settings import Attributes
from ._arrays import as_traced, to_jax
from ._checks import check_module
from ._numbers import numbers_kept, numbers_of, refuse_changes
from ._plain_tensors import plain_tensors_kept
from .tracing import TracingEnvironment, cumulative_averages, tracing

Arrays = dict[str, jax.Array]


class Functional:
    """A module as a function of its tensors, in the mode that it has at construction.

    Attributes:
      trained: names of the trained parameters; tied ones once.
      carried: names of the other parameters and of the buffers.
    """

    def __init__(self, owner: str, module: torch.nn.Module) -> None:
        check_module(owner, module)
        self._owner, self._module = owner, module
        self._modes = [(m, m.training) for m in module.modules()]
        self._kept = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.trained = [n for n, p in module.named_parameters() if p.requires_grad]
        self.carried = [n for n in self._kept if n not in set(self.trained)]
        self._numbers: Attributes | None = None  # at the first trace

    def values(self) -> tuple[Arrays, Arrays]:
        """Return copies of the module's arrays: trained parameters, and all others."""
        arrays = {name: to_jax(tensor) for name, tensor in self._kept.items()}
        return {n: arrays[n] for n in self.trained}, {n: arrays[n] for n in self.carried}

    def call(
        self,
        run: Callable[[TracingEnvironment, torch.nn.Module], Any],
        params: Arrays,
        model_state: Arrays,
        rng: jax.Array | None,
    ) -> tuple[Any, Arrays]:
        """Return the result of `run` on the module with these tensors, and the carried ones after.

        Raises:
          ValueError: arrays of other names; a module that keeps traced tensors, or whose Python
            numbers change: in forward, or since the first trace.
        """
        self.refuse_changed_numbers()
        self._check_names("params", self.trained, params)
        self._check_names("model_state", self.carried, model_state)
        with tracing(rng, self._module) as env, self._in_its_mode():
            tensors = as_traced(env, {**params, **model_state})
            for name, tensor in tensors.items():
                tensor._is_param = isinstance(self._kept[name], torch.nn.Parameter)
                tensor.requires_grad = name in params
            with (
                plain_tensors_kept(self._owner, self._module, env),
                numbers_kept(self._owner, self._module) as kept,
            ):
                out, after = torch.func.functional_call(
                    _Around(self._module, lambda module: run(env, module)),
                    {f"module.{name}": tensor for name, tensor in tensors.items()},
                    (self.carried,),
                )
            # In a trace, operations on constants return tracers, too.
            if self._numbers is None and isinstance(jnp.zeros(()), Tracer):
                self._numbers = numbers_of(self._module)
                self._numbers.leave_out(kept)
            return out, {name: tensor.jax() for name, tensor in after.items()}

    def refuse_changed_numbers(self) -> None:
        """Raise `ValueError` if Python numbers of the module changed since the first trace."""
        if self._numbers is not None:
            refuse_changes(self._owner, self._numbers)

    def _check_names(self, argument: str, names: list[str], tree: Any) -> None:
        if not isinstance(tree, dict):
            raise ValueError(
                f"{self._owner}: `{argument}` must be a dict of arrays by name, got "
                f"{type(tree).__name__}."
            )
        if tree.keys() != set(names):
            missing, unknown = (sorted(set(names) - tree.keys()), sorted(tree.keys() - set(names)))
            raise ValueError(
                f"{self._owner}: `params` must have the names of the parameters that require "
                "gradients, and `model_state` those of the other parameters and of the buffers; "
                f"`{argument}` lacks {missing}, and has unknown {unknown}."
            )

    @contextlib.contextmanager
    def _in_its_mode(self) -> Iterator[None]:
        """Run the block with every part in training or evaluation as at construction."""
        previous = [(m, m.training) for m, _ in self._modes]
        try:
            for part, training in self._modes:
                part.training = training
            with cumulative_averages(self._module):
                yield
        finally:
            for part, training in previous:
                part.training = training


class _Around(torch.nn.Module):
    """A module that calls a function while `functional_call` has replaced tensors."""

    def __init__(self, module: torch.nn.Module, run: Callable[[torch.nn.Module], Any]) -> None:
        super().__init__()
        self.module, self._run = module, run

    def forward(self, carried: list[str]) -> tuple[Any, dict[str, Any]]:
        """Return the result, and the tensors of these names, which may be new objects."""
        out = self._run(self.module)
        held = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return out, {name: held[name] for name in carried}
