"""A module as a function of its parameters and its other tensors."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from torch.nn.parameter import is_lazy

from ..settings import changed_values, is_plain, plain_attributes
from ._arrays import PLAIN_TENSORS, jax_dtype, keeps_values, to_jax
from .tracing import (
    Input,
    OptimizedModule,
    Values,
    as_parameter,
    call,
    constant,
    cumulative_averages,
    has_changed,
    torch_dtype,
)


def check_module(owner: str, module: Any) -> None:
    """Raise `ValueError` unless jax can hold every tensor of the module; name all it cannot."""
    if not isinstance(module, torch.nn.Module):
        raise ValueError(
            f"{owner}: `module` must be a torch.nn.Module, got {type(module).__name__}."
        )
    inner = "_orig_mod" if hasattr(module, "_orig_mod") else "module"
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | OptimizedModule):
        kind = type(module).__name__
        raise ValueError(f"{owner}: `module` is a {kind}: give the module in it, `module.{inner}`.")
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"{owner}: `module` is compiled by TorchScript: give the module that it was made of."
        )
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    problems = [
        f"{name} {problem}"
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if (problem := _problem(tensor))
    ]
    problems += [
        f"{name} is {p.dtype}, and only floating numbers are trained"
        for name, p in trained
        if not p.is_floating_point()
    ]
    if problems:
        raise ValueError(f"{owner}: `module` holds what jax cannot: {'; '.join(problems)}.")


def _problem(tensor: torch.Tensor) -> str | None:
    """Return why a parameter or a buffer cannot be an array of jax, or None."""
    if is_lazy(tensor):
        return "has no shape yet: call the module once"
    if type(tensor) not in PLAIN_TENSORS:
        return f"is a {type(tensor).__name__}, not a plain tensor"
    if tensor.is_meta:
        return "is on the meta device, without values: initialise it with module.to_empty(...)"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}, not torch.strided"
    if jax_dtype(tensor.dtype) is None:
        return f"is {tensor.dtype}, a dtype that is not supported"
    if not keeps_values(tensor):
        return (
            f"is {tensor.dtype} and would lose digits, since jax has 32 bits by default: convert "
            'the module (module.float()), or jax.config.update("jax_enable_x64", True)'
        )
    return None


# `Functional` keeps the mode of each part; hooks of the backward pass do not matter in a trace.
_OTHERS = {"training", "_is_full_backward_hook"}


@contextlib.contextmanager
def attributes_kept(
    owner: str, module: torch.nn.Module, values: Values
) -> Iterator[dict[str, Any]]:
    """Run the block, in which the module is traced, and then restore its attributes.

    Plain tensors among them are constants of the trace. A value that a call sets and reads again,
    such as an auxiliary loss, may be an attribute. A value for the next call may not: it would be
    lost. Numbers that were None, and tuples, such as the shape of the last batch, may change. Hooks
    are removed that modules add in their first call, as some do, and note in a number.

    Yields:
      The numbers by path, from which those that have changed are removed after the block.

    Raises:
      ValueError: a tensor that was read and then changed; an existing number that has changed.
    """
    numbers = plain_attributes(module)
    numbers = {p: x for p, x in numbers.items() if p.rpartition(".")[2] not in _OTHERS}
    before = [(path, vars(part), dict(vars(part))) for path, part in module.named_modules()]
    hooks = [(x, dict(x)) for _, _, old in before for n, x in old.items() if n.endswith("_hooks")]
    constants = {
        path: {name: constant(x) for name, x in old.items() if isinstance(x, torch.Tensor)}
        for path, _, old in before
    }
    try:
        for path, attributes, _ in before:
            attributes.update(constants[path])
        yield numbers
        changes = _changes(module, numbers)
        lost_tensors = [
            f"{path}.{name}" if path else name
            for path, attributes, _ in before
            for name, x in constants[path].items()
            if (attributes.get(name) is not x and id(x) in values.seen) or has_changed(x)
        ]
    finally:
        for _, attributes, old in before:
            for name in attributes.keys() - old.keys():
                if isinstance(attributes[name], torch.Tensor) or is_plain(attributes[name]):
                    del attributes[name]
            attributes.update(old)
        for now, then in hooks:
            for key in now.keys() - then.keys():
                del now[key]
    if lost_tensors:
        raise ValueError(
            f"{owner}: the module changes {', '.join(lost_tensors)}, and the change would be lost: "
            "make these tensors buffers (module.register_buffer)."
        )
    previous = {path: numbers.pop(path) for path in changes}
    lost = [path for path, x in previous.items() if x is not None and not isinstance(x, tuple)]
    if lost:
        raise ValueError(
            f"{owner}: the module changes {', '.join(lost)} in forward, numbers that a compiled "
            "program does not change: make them buffers (module.register_buffer), or local."
        )


def _changes(module: torch.nn.Module, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new values of those numbers that the module still has."""
    now = plain_attributes(module)
    return changed_values(numbers, {path: now[path] for path in numbers if path in now})


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

        def run_traced(values: Values, tensors: list[Any]) -> list[torch.Tensor]:
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
        found = iter(call(run_traced, inputs, rng, self._module))
        flat = [next(found) if isinstance(x, torch.Tensor) else x for x in results[0]]
        return jax.tree.unflatten(results[1], flat)

    def refuse_changed_numbers(self) -> None:
        """Raise `ValueError` if Python numbers of the module changed since the first trace."""
        numbers = self._numbers or {}
        if changes := _changes(self._module, numbers):
            described = "; ".join(
                f"{path} was {numbers[path]!r} and is {x!r}" for path, x in changes.items()
            )
            raise ValueError(
                f"{self._owner}: numbers of the module have changed since it was compiled, which "
                f"has no effect: {described}. Make them buffers, or call {self._owner} again."
            )

    def _check_names(self, argument: str, names: list[str], tree: Any) -> None:
        if not isinstance(tree, dict):
            raise ValueError(
                f"{self._owner}: `{argument}` must be a dict of arrays by name, got "
                f"{type(tree).__name__}."
            )
        if tree.keys() != set(names):
            missing, unknown = (sorted(set(names) - tree.keys()), sorted(tree.keys() - set(names)))
            raise ValueError(
                f"{self._owner}: `params` must have the trained parameters and `model_state` all "
                f"others; `{argument}` lacks {missing}, and has unknown {unknown}."
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
