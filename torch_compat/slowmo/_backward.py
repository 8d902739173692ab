"""Something to do when a backward pass through a module's output has finished."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch_xla

from .. import runtime


class AfterBackward:
    """Calls a function once at the end of every backward pass through a watched output.

    The autograd engine calls it on its own thread for the device, which is then bound to that
    device; an exception there is raised by `backward()`.
    """

    def __init__(self, call: Callable[[torch.device], None]) -> None:
        self._call = call
        self._is_queued = False

    def watch(self, output: Any, device: torch.device) -> bool:
        """Watch all tensors in `output` that require gradients; whether there are any.

        `output` may be nested out of tuples, lists, mappings, dataclasses and plain objects.
        """
        self._is_queued = False  # a backward pass that failed left it set
        found = False
        for tensor in _tensors(output, set()):
            if tensor.requires_grad:
                found = True
                tensor.register_hook(lambda _: self._queue(device))
        return found

    def _queue(self, device: torch.device) -> None:
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(device))

    def _finish(self, device: torch.device) -> None:
        self._is_queued = False
        with _driving(device):
            self._call(device)


@contextmanager
def _driving(device: torch.device) -> Iterator[None]:
    """The calling thread drives `device`; afterwards again the one it had."""
    before = torch_xla.device()
    runtime.bind(device)
    try:
        yield
    finally:
        runtime.bind(before)


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen or value is None or isinstance(value, str | int | float | bool):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        yield from _tensors(part, seen)
