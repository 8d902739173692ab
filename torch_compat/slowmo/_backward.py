"""A hook that runs when a backward pass through a module's output has finished."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ._graphs import driving


class AfterBackward:
    """A function that is called once at the end of every backward pass through a watched output.

    The autograd engine calls the function on its own thread for the device, which is bound to the
    device during the call; `backward()` raises an exception of the function.
    """

    def __init__(self, call: Callable[[torch.device, bool], None]) -> None:
        self._call = call
        self._is_queued = False
        self._averages = False
        self._on_leaves: list[Any] = []

    def watch(self, output: Any, device: torch.device, *, averages: bool = True) -> bool:
        """Watch all tensors in `output` that require gradients; return whether there are any.

        The function's arguments are `device`, and whether any output that the backward pass went
        through was watched with `averages`.

        `output` may nest tuples, lists, mappings, dataclasses and plain objects; the parameters of
        a module in it are not watched.
        """
        self._is_queued = self._averages = False  # a failed backward pass leaves them set
        requires_grad = False
        # Hooks on results are freed with the graph of the pass. A parameter that the module returns
        # outlives the pass, and would collect one hook per pass.
        for handle in self._on_leaves:
            handle.remove()
        self._on_leaves = []
        for tensor in _tensors(output, set()):
            if tensor.requires_grad:
                requires_grad = True
                handle = tensor.register_hook(lambda _: self._queue(device, averages))
                if tensor.is_leaf:
                    self._on_leaves.append(handle)
        return requires_grad

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
