"""Tensors of a module that are neither parameters nor buffers: constants of a trace."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .tracing import Values, constant, has_changed


@contextlib.contextmanager
def plain_tensors_kept(owner: str, module: torch.nn.Module, values: Values) -> Iterator[None]:
    """Run the block with attributes that are plain tensors traced, and then restore them.

    A value that a call sets and reads again, such as an auxiliary loss, may be an attribute. A
    value for the next call may not: it would be lost.

    Raises:
      ValueError: an attribute that was read and then changed.
    """
    before = [(m, dict(vars(m))) for m in module.modules()]
    constants: dict[tuple[int, str], Any] = {}
    for part, attributes in before:
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                constants[id(part), name] = part.__dict__[name] = constant(value)
    lost: list[str] = []
    try:
        yield
        names = {id(part): name for name, part in module.named_modules()}
        for part, attributes in before:
            for name in attributes:
                if (id(part), name) not in constants:
                    continue
                old = constants[id(part), name]
                is_replaced = part.__dict__.get(name) is not old and id(old) in values.seen
                if is_replaced or has_changed(old):
                    lost.append(".".join(filter(None, [names.get(id(part), ""), name])))
    finally:
        for part, attributes in before:
            for name, value in list(part.__dict__.items()):
                if name in attributes:
                    part.__dict__[name] = attributes[name]
                elif isinstance(value, torch.Tensor):
                    del part.__dict__[name]
    if lost:
        raise ValueError(
            f"{owner}: the module changes {', '.join(lost)}, tensors that are neither parameters "
            "nor buffers, and the change would be lost: register them as buffers "
            "(module.register_buffer)."
        )
