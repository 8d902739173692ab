"""A module as a function of its parameters and its other tensors."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer

from ._arrays import to_jax
from ._attributes import attributes_kept, refuse_changes
from ._checks import check_module
from .tracing import Input, Values, as_parameter, call, cumulative_averages, torch_dtype

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
        self._numbers: dict[str, Any] | None = None  # at the first trace

    def values(self) -> tuple[Arrays, Arrays]:
        """Return copies of the module's arrays: trained parameters, and all others."""
        arrays = {name: to_jax(tensor) for name, tensor in self._kept.items()}
        return {n: arrays[n] for n in self.trained}, {n: arrays[n] for n in self.carried}

    def call(
        self,
        run: Callable[[torch.nn.Module, Any], Any],
        params: Arrays,
        model_state: Arrays,
        rng: jax.Array | None,
        given: Any,
    ) -> tuple[Any, Arrays]:
        """Return the result of `run` on the module with these tensors, and the carried ones after.

        Args:
          run: function of the module and `given` that returns a tree of tensors.
          params: the trained parameters.
          model_state: the other tensors.
          rng: PRNG key of random numbers.
          given: tree of arrays and other values, such as a batch.

        Raises:
          ValueError: arrays of other names; a module that keeps traced tensors, or whose Python
            numbers change: in forward, or since the first trace.
        """
        self.refuse_changed_numbers()
        self._check_names("params", self.trained, params)
        self._check_names("model_state", self.carried, model_state)
        leaves, structure = jax.tree.flatten(given)
        places = [i for i, x in enumerate(leaves) if _is_array(x)]
        arrays = [jnp.asarray(leaves[i]) for i in places]
        names = [*self.trained, *self.carried]
        inputs = [
            *(Input(params[n], self._kept[n].dtype, trained=True) for n in self.trained),
            *(Input(model_state[n], self._kept[n].dtype) for n in self.carried),
            *(Input(x, torch_dtype(x)) for x in arrays),
        ]
        results: list[Any] = []  # and their structure

        def traced(values: Values, tensors: list[Any]) -> list[torch.Tensor]:
            held = dict(zip(names, tensors, strict=False))
            for name, tensor in held.items():
                if isinstance(self._kept[name], torch.nn.Parameter):
                    as_parameter(tensor)
            for i, tensor in zip(places, tensors[len(names) :], strict=True):
                leaves[i] = tensor
            with (
                self._in_its_mode(),
                attributes_kept(self._owner, self._module, values) as numbers,
            ):
                result = torch.func.functional_call(
                    _Around(self._module, run),
                    {f"module.{name}": tensor for name, tensor in held.items()},
                    (jax.tree.unflatten(structure, leaves), self.carried),
                )
            if self._numbers is None and is_traced:
                self._numbers = numbers
            results[:] = jax.tree.flatten(result)
            return [x for x in results[0] if isinstance(x, torch.Tensor)]

        # In a trace, operations on constants return tracers, too.
        is_traced = isinstance(jnp.zeros(()), Tracer)
        found = iter(call(traced, inputs, rng, self._module))
        flat = [next(found) if isinstance(x, torch.Tensor) else x for x in results[0]]
        return jax.tree.unflatten(results[1], flat)

    def refuse_changed_numbers(self) -> None:
        """Raise `ValueError` if Python numbers of the module changed since the first trace."""
        if self._numbers is not None:
            refuse_changes(self._owner, self._module, self._numbers)

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

    def __init__(self, module: torch.nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._run = module, run

    def forward(self, given: Any, carried: list[str]) -> tuple[Any, dict[str, Any]]:
        """Return the result, and the tensors of these names, which may be new objects."""
        out = self._run(self.module, given)
        held = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return out, {name: held[name] for name in carried}


def _is_array(x: Any) -> bool:
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic)
    return is_array and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
