"""Something to do when a backward pass through a module's output has finished."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ._graphs import driving


class AfterBackward:
    """Calls a function once at the end of every backward pass through a watched output.

    The autograd engine calls it on its own thread for the device, which is then bound to that
    device; an exception there is raised by `backward()`.
    """

    def __init__(self, call: Callable[[torch.device, bool], None]) -> None:
        self._call = call
        self._is_queued = False
        self._averages = False
        self._on_leaves: list[Any] = []

    def watch(self, output: Any, device: torch.device, *, averages: bool = True) -> bool:
        """Watch all tensors in `output` that require gradients; whether there are any.

        The function is called with `device`, and with whether any of the outputs that the backward
        pass went through was watched with `averages`.

        `output` may be nested out of tuples, lists, mappings, dataclasses and plain objects; the
        parameters of a module in it are none of its tensors.
        """
        self._is_queued = self._averages = False  # a backward pass that failed left them set
        found = False
        # Hooks on results go with the graph of the pass. Parameters stay: a hook of each pass on
        # one that the module returns would never go.
        for handle in self._on_leaves:
            handle.remove()
        self._on_leaves = []
        for tensor in _tensors(output, set()):
            if tensor.requires_grad:
                found = True
                handle = tensor.register_hook(lambda _: self._queue(device, averages))
                if tensor.is_leaf:
                    self._on_leaves.append(handle)
        return found

    def _queue(self, device: torch.device, averages: bool) -> None:
        self._averages |= averages
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(device))

    def _finish(self, device: torch.device) -> None:
        averages = self._averages
        self._is_queued = self._averages = False
        with driving(device):
            self._call(device, averages)


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen or isinstance(value, str | int | float | torch.nn.Module | None):
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
