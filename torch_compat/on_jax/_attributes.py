"""Attributes of a module that are no parameters, buffers or modules, while it is traced.

A compiled program keeps the Python numbers that it was traced with.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..settings import changed, is_plain, plain_attributes
from .tracing import Values, constant, has_changed

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
            f"{owner}: the module changes {', '.join(lost_tensors)}, tensors that are neither "
            "parameters nor buffers, and the change would be lost: register them as buffers "
            "(module.register_buffer)."
        )
    previous = {path: numbers.pop(path) for path in changes}
    lost = [path for path, x in previous.items() if x is not None and not isinstance(x, tuple)]
    if lost:
        raise ValueError(
            f"{owner}: the module changes {', '.join(lost)} in forward, Python numbers that a "
            "compiled program does not change again: make a count a buffer "
            "(module.register_buffer), and what one call alone needs a local variable."
        )


def refuse_changes(owner: str, module: torch.nn.Module, numbers: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the module no longer has the numbers that it was traced with."""
    if changes := _changes(module, numbers):
        described = "; ".join(
            f"{path} was {numbers[path]!r} and is {x!r}" for path, x in changes.items()
        )
        raise ValueError(
            f"{owner}: Python numbers of the module have changed since it was compiled, which has "
            f"no effect on the program: {described}. Make them buffers (module.register_buffer), "
            f"whose values are in model_state, or call {owner} again for another program."
        )


def _changes(module: torch.nn.Module, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new values of those numbers that the module still has."""
    now = plain_attributes(module)
    return changed(numbers, {path: now[path] for path in numbers if path in now})
