"""Loss functions that are computed outside of the step's programs, which take what they gave."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from ...._support.types import PyTree
from ....tracing import FullLoss


class WithResults(NamedTuple):
    """A batch, and what a dispatched loss function has computed of it.

    Attributes:
      batch: the batch itself.
      results: what the loss function takes in the place of the batch, inside of a program; leaves
        have a leading dimension over the positions between which the batch is split.
    """

    batch: PyTree
    results: PyTree


@dataclass(frozen=True)
class Dispatched:
    """A loss function with a method `dispatch`, as a pipeline dispatched by the host has one.

    Attributes:
      loss_fn: the loss function.
      completed: wraps a loss function in what the step does around it, such as a policy.
      parts: into how many parts `accumulate` cuts a batch, for `dispatch` to average over.
      is_cast: whether the loss function is given other parameters and batches than the step.
    """

    loss_fn: Any
    completed: Callable[[Callable[..., Any]], FullLoss]
    parts: int
    is_cast: bool

    def loss(
        self, params: PyTree, batch: WithResults, *, rng: Any, model_state: PyTree
    ) -> tuple[Any, Any]:
        """Return loss, metrics and model state of a batch whose results are known."""

        def of_results(params: PyTree, _: PyTree, **keywords: Any) -> Any:
            return self.loss_fn(params, batch.results, **keywords)

        full = self.completed(self._with_signature(of_results))
        return full(params, batch.batch, rng=rng, model_state=model_state)

    def arguments(self, params: PyTree, batch: PyTree, *, rng: Any, model_state: PyTree) -> Any:
        """Return parameters, batch, key and model state as the loss function is given them."""
        seen: list[Any] = []

        def recorded(
            params: PyTree, batch: PyTree, *, rng: Any = None, model_state: PyTree = None
        ) -> Any:
            seen.append((params, batch, rng, model_state))
            return jnp.zeros(()), ({}, model_state)

        full = self.completed(self._with_signature(recorded))
        full(params, batch, rng=rng, model_state=model_state)
        return seen[0]

    def _with_signature(self, fn: Any) -> Any:
        fn.__signature__ = inspect.signature(self.loss_fn)
        return fn
