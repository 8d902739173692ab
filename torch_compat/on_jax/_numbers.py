"""Python numbers of a module: a compiled program keeps those that it was traced with."""

import contextlib
from collections.abc import Iterator

import torch

from ..settings import Attributes, is_plain

# `Functional` keeps the mode of each part; hooks of the backward pass do not matter in a trace.
_OTHERS = {"training", "_is_full_backward_hook"}


def numbers_of(module: torch.nn.Module) -> Attributes:
    """Return the current numbers of the module, for a later comparison."""
    return Attributes(module, leave_out=_OTHERS)


@contextlib.contextmanager
def numbers_kept(owner: str, module: torch.nn.Module) -> Iterator[set[str]]:
    """Run the block, in which the module is traced, and then remove numbers that it has added.

    Attributes that were None, and tuples, such as the shape of the last batch, may change.

    Yields:
      A set, which contains the paths of these after the block.

    Raises:
      ValueError: an existing number has changed its value.
    """
    numbers = numbers_of(module)
    before = [(vars(part), set(vars(part))) for part in module.modules()]
    kept: set[str] = set()
    try:
        yield kept
    finally:
        for attributes, names in before:
            for name in [n for n in attributes if n not in names and is_plain(attributes[n])]:
                del attributes[name]
    changes = numbers.changes()
    kept.update(path for path, old, _ in changes if old is None or isinstance(old, tuple))
    if names := ", ".join(path for path, _, _ in changes if path not in kept):
        raise ValueError(
            f"{owner}: the module changes {names} in forward, Python numbers that a compiled "
            "program does not change again: make a count a buffer (module.register_buffer), and "
            "what one call alone needs a local variable."
        )


def refuse_changes(owner: str, numbers: Attributes) -> None:
    """Raise `ValueError` if the module no longer has the numbers that it was traced with."""
    if changes := numbers.changes():
        described = "; ".join(f"{path} was {old!r} and is {new!r}" for path, old, new in changes)
        raise ValueError(
            f"{owner}: Python numbers of the module have changed since it was compiled, which has "
            f"no effect on the program: {described}. Make them buffers (module.register_buffer), "
            f"whose values are in model_state, or call {owner} again for another program."
        )
