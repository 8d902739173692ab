"""The steps of a training loop, which are compared with its calls of `perform_slowmo`."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ._collectives import Collectives

# By `id`; iterating over a list of references is safe beside other threads' wrappers.
_COUNTERS: WeakValueDictionary[int, "Steps"] = WeakValueDictionary()


class Steps:
    """The optimizer steps and forward passes of one wrapper since its last `perform_slowmo`.

    Steps of an optimizer are counted, not backward passes, so gradients may accumulate over any
    number of them. Of several optimizers the one that steps first after a call is counted.
    `Collectives.num_missed` grows by every step that follows another one without a call between
    them, and falls by every call that follows neither a step nor a forward pass: a
    `torch.amp.GradScaler` leaves out steps.

    Args:
      collectives: the collectives of this process.
      limit: number of steps without a call after which the next one warns, once; None for never.
    """

    def __init__(self, collectives: Collectives, limit: int | None) -> None:
        self._collectives = collectives
        self._limit = limit
        self._params: Mapping[str, torch.Tensor] = {}
        self._has_run: bool | None = None  # since the last call; None before any forward pass
        # Ids, not references: the wrapper can be copied and pickled without its optimizers.
        self._optimizers: frozenset[int] = frozenset()
        self._first = self._since = 0

    def note_forward(self, params: Mapping[str, torch.Tensor]) -> None:
        """Note a forward pass, and the parameters whose optimizers are counted from now on."""
        _COUNTERS[id(self)] = self
        self._params, self._has_run = params, True

    def note_call(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Note a call of `perform_slowmo` with these optimizers."""
        if self._has_run is False and not self._since:
            self._collectives.num_missed -= 1
        self._optimizers = frozenset(map(id, optimizers))
        self._since = 0
        self._has_run = None if self._has_run is None else False

    def counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer holds parameters of the wrapper, or masters of them."""
        if id(optimizer) in self._optimizers:
            return True
        own = {*map(id, self._params.values())}
        return any(id(param) in own for g in optimizer.param_groups for param in g["params"])

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step of an optimizer that `counts`.

        Raises:
          UserWarning: more than `limit` steps without a call.
        """
        if self._since and id(optimizer) != self._first:
            return
        self._first = id(optimizer)
        self._since += 1
        if self._since == 1:
            return
        self._collectives.num_missed += 1
        if self._limit is not None and self._since > self._limit:
            self._limit = None
            places = self._collectives.places
            warnings.warn(
                f"perform_slowmo(optimizer) was not called in {self._since} steps of the "
                f"optimizer, so process {places.rank} of {places.world_size} trains alone: call "
                "it after every optimizer.step(), in all processes.",
                stacklevel=4,  # the caller of `optimizer.step()`
            )


def _on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    if torch.compiler.is_compiling():
        return
    for reference in _COUNTERS.valuerefs():
        steps = reference()
        if steps is not None and steps.counts(optimizer):
            steps.note_step(optimizer)


register_optimizer_step_post_hook(_on_step)
