"""Hooks that run a wrapper's part of each backward pass, at its begin and at its end."""

from collections.abc import Iterable
from typing import Any
from weakref import ReferenceType, finalize, ref

import torch
from torch.utils._pytree import tree_leaves

from ._graphs import driving


class BackwardHooks:
    """The hooks of one wrapper on its parameters and on the outputs of its forward passes.

    They notice a backward pass that goes through the output of a forward pass, and one that reaches
    a parameter in any other way, such as a loss of its own on a part of the module. When autograd
    has done all of the pass, its thread for the device, bound to that device, calls the wrapper;
    `backward()` raises exceptions of this call. Hooks do not keep the wrapper alive, and are
    removed with it.

    A wrapper has `exchanges_gradients`, whether it is in training mode and outside of `no_sync`,
    and two methods: `_begin_backward()`, called when a pass comes to the output of a forward pass,
    and `_finish_backward(device, *, averages, reached_parameters)`. `averages` is what
    `exchanges_gradients` was in one of the forward passes that the backward pass went through, or
    is now if it went through none; `reached_parameters` whether it has added to any gradient.
    """

    def __init__(self) -> None:
        self._hooked: dict[int, ReferenceType[torch.Tensor]] = {}
        self._forget()

    def __reduce__(self) -> Any:
        return BackwardHooks, ()  # a copy of the wrapper has hooks of its own

    def _forget(self) -> None:
        self._is_queued = self._has_reached = False
        self._seen: set[bool] = set()  # the `averages` of the outputs that the pass went through

    def on_parameters(self, owner: Any, params: Iterable[torch.nn.Parameter]) -> None:
        """Let backward passes that reach `params` end with a call of `owner`."""
        reference = ref(owner)

        def on_gradient(param: torch.Tensor) -> None:
            if (net := reference()) is not None:
                self._has_reached = True
                self._queue(net, param.device)

        for param in params:
            known = self._hooked.get(id(param))
            is_new = known is None or known() is not param
            if param.requires_grad and param.is_leaf and is_new:
                handle = param.register_post_accumulate_grad_hook(on_gradient)
                self._hooked[id(param)] = ref(param)
                finalize(owner, handle.remove)

    def on_output(self, owner: Any, output: Any, device: torch.device, *, averages: bool) -> None:
        """Watch the tensors in `output`, in any nesting that torch's pytrees know.

        Args:
          owner: the wrapper.
          output: result of a forward pass.
          device: the device of this process.
          averages: `exchanges_gradients` in the forward pass.
        """
        if torch._C._current_graph_task_id() < 0:  # no checkpoint runs this within a backward pass
            self._forget()  # a failed one leaves something behind
        reference = ref(owner)

        def on_output_gradient(gradient: torch.Tensor) -> None:
            del gradient
            if (net := reference()) is not None:
                if not self._seen:
                    net._begin_backward()
                self._seen.add(averages)
                self._queue(net, device)

        for tensor in tree_leaves(output):
            # A leaf is a parameter that the module returns; it would collect a hook in each pass.
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(on_output_gradient)

    def _queue(self, owner: Any, device: torch.device) -> None:
        if self._is_queued:
            return
        self._is_queued = True

        def finish() -> None:
            averages = any(self._seen) if self._seen else owner.exchanges_gradients
            reached = self._has_reached
            self._forget()
            with driving(device):
                owner._finish_backward(device, averages=averages, reached_parameters=reached)

        torch.autograd.Variable._execution_engine.queue_callback(finish)
