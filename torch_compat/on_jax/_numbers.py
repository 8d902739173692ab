"""Python numbers of a module: a compiled program keeps those that it was traced with."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..settings import changed, is_plain, plain_attributes

# `Functional` keeps the mode of each part; hooks of the backward pass do not matter in a trace.
_OTHERS = {"training", "_is_full_backward_hook"}


@contextlib.contextmanager
def numbers_kept(owner: str, module: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """Run the block, in which the module is traced, and remove numbers and hooks that it has added.

    Some modules add hooks in their first call, and note that in a number.

    Attributes that were None, and tuples, such as the shape of the last batch, may change.

    Yields:
      The numbers by path, from which those that have changed are removed after the block.

    Raises:
      ValueError: an existing number has changed its value.
    """
    numbers = plain_attributes(module)
    numbers = {p: x for p, x in numbers.items() if p.rpartition(".")[2] not in _OTHERS}
    before = [(vars(part), set(vars(part))) for part in module.modules()]
    hooks = [(x, dict(x)) for own, _ in before for n, x in own.items() if n.endswith("_hooks")]
    try:
        yield numbers
    finally:
        for attributes, names in before:
            for name in [n for n in attributes if n not in names and is_plain(attributes[n])]:
                del attributes[name]
        for now, then in hooks:
            for key in now.keys() - then:
                del now[key]
    changes = {path: numbers.pop(path) for path in _changes(module, numbers)}
    lost = [path for path, x in changes.items() if x is not None and not isinstance(x, tuple)]
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
