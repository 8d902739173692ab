"""A training step that also starts the table lookups of the next batch."""

import weakref
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from ..._support.checks import as_number, check_choice, checked_int
from ..._support.types import PyTree
from ...embedding import Embeddings, PrefetchedRows, PrefetchOptions, WithTables
from .._train_state import TrainState
from ._checks import check_window_weight
from ._gradients import GradientWindow, Metrics, StepInputs
from ._programs import Task
from ._runner import Runner
from ._update import without_optimizer

AheadMode = Literal["exact", "stale", "patched"]


class PendingLookup(NamedTuple):
    """A table lookup that was started for a batch before its own step.

    Attributes:
      carry: the requests and, but in mode `"exact"`, the rows; arrays on the devices.
      batch: the batch of the lookup, placed on the devices.
      tables: references to the arrays of the state that the rows were read from; () without rows.
    """

    carry: PrefetchedRows
    batch: PyTree
    tables: tuple[weakref.ref[Any], ...]

    def is_current(self, params: WithTables) -> bool:
        """Return whether the rows were read from these very tables; True without rows."""
        if self.carry.vectors is None:
            return True
        current = jax.tree.leaves(params.tables)
        return all(ref() is x for ref, x in zip(self.tables, current, strict=True))


class AheadStep:
    """A training step that also looks up the rows of the next batch; made by `step.ahead`.

        asked = ahead.prime(state, first)
        state, metrics, asked = ahead(state, first, asked, second)
        state, metrics, asked = ahead(state, second, asked, None)

    Args:
      runner: the runner of the step.
      mode: what the step before a batch does for it. `"exact"` exchanges row numbers; the batch's
        own step looks up the rows and sends them. `"stale"` also looks up and sends the rows, as
        they are before that step, so they are one update stale. `"patched"` does the same, and then
        sends the rows again that the step has changed: results equal `"exact"`, bit for bit on CPU.
      num_exact: number of first batches for which `"stale"` acts like `"exact"`; default 0.
      room: fraction of the slots whose rows `"patched"` can send again, default 0.25; if more rows
        have changed, all are looked up again.

    Raises:
      ValueError: a step without `embeddings`; another mode; num_exact < 0, or not 0 in another mode
        than `"stale"`; room not above 0 and at most 1.
    """

    def __init__(
        self, runner: Runner, mode: AheadMode, num_exact: int = 0, room: float = 0.25
    ) -> None:
        check_choice("mode", mode, AheadMode)
        if runner.embeddings is None:
            raise ValueError(
                f"`mode`={mode!r} needs tables, those of js.make_train_step(embeddings=...)."
            )
        num_exact = checked_int("`num_exact` counts batches and", num_exact, 0)
        if num_exact and mode != "stale":
            raise ValueError(f'`num_exact` is for `mode`="stale", got {num_exact} with {mode!r}.')
        number = as_number(room)
        if number is None or not 0 < number <= 1:
            raise ValueError(f"`room` must be a number above 0 and at most 1, got {room!r}.")
        self._embeddings = runner.embeddings
        self._runner, self.mode, self._num_exact = runner, mode, num_exact
        self._vectors = PrefetchOptions(mode != "exact", mode == "patched", room)
        self._count = 0

    def prime(self, state: TrainState, batch: PyTree) -> PendingLookup:
        """Start the lookup of the first batch, without running a step.

        Communication: that of `Embeddings.exchange_ids`, and of `Embeddings.lookup` if the rows of
          this batch are looked up ahead.
        """
        state = self._runner.accept_state(state)
        inputs = StepInputs(*self._runner.place(batch))
        carry = self._request(self._lookup_scope(inputs.batch), state, inputs)
        self._count += 1
        return self._as_pending(carry, inputs.batch, state)

    def __call__(
        self,
        state: TrainState,
        batch: PyTree,
        asked: PendingLookup,
        next_batch: PyTree | None,
        weight: Any = None,
        window: GradientWindow | None = None,
        collect: bool = False,
        num_batches: int = 0,
    ) -> tuple[Any, Metrics, PendingLookup | None]:
        """Run `step` or `step.collect` on a batch, and start the lookup of the next one.

        Args:
          state: the state that the step takes. If its tables are not those that the last step
            returned, such as after a rollback, the rows of `batch` are looked up again first.
          batch: the batch for which `asked` was returned.
          asked: the lookup that `prime` or the call before returned for this batch.
          next_batch: the batch of the next call; None starts no lookup.
          weight: weight of `batch`.
          window: the window that the step takes.
          collect: whether to call `step.collect`: gradients go into a window, with no update.
          num_batches: the argument `num_batches` of `step.collect`.

        Returns:
          `(state, metrics, asked)`, or with `collect` `(window, metrics, asked)`. With
          `"patched"` metrics also hold `embeddings/NAME/resent`.

        Raises:
          ValueError: any error of the step; `asked` is for a batch with other ids or weights of
            bags. Arrays of jax that are the same objects are not compared; others are compared on
            the host, before anything runs. Inside of jax.jit nothing is compared.

        Communication: the step's, that of `Embeddings.exchange_ids` and, but in `"exact"`, of
          `Embeddings.lookup` for the next batch, in place of its own; with `"patched"`, per table,
          two all-to-alls of the row numbers and rows that are sent again.
        """
        runner = self._runner
        state = runner.accept_state(state)
        runner.check_window(window, state)
        check_window_weight(window, weight)
        batch, weight = runner.place(batch, weight)
        _check_same_ids(self._embeddings, asked.batch, batch)
        if next_batch is not None:
            next_batch, _ = runner.place(next_batch)
        ahead = self._lookup_scope(next_batch)
        self._count += next_batch is not None
        carry = asked.carry
        if not asked.is_current(state.params):
            carry = self._request(PrefetchOptions(vectors=True), state, StepInputs(carry=carry))
        inputs = StepInputs(batch, weight, window, carry, next_batch)
        if collect:
            new, metrics, carry = runner.collect(state, inputs, num_batches, ahead)
            return new, metrics, self._as_pending(carry, next_batch, state)
        new, metrics, carry = runner.run_update(state, inputs, ahead)
        return new, metrics, self._as_pending(carry, next_batch, new)

    def compiled(
        self,
        state: TrainState,
        batch: PyTree,
        asked: PendingLookup,
        next_batch: PyTree | None,
        weight: Any = None,
        window: GradientWindow | None = None,
    ) -> jax.stages.Compiled:
        """Return the compiled program of such an update, compiling it if needed; nothing runs."""
        inputs = StepInputs(batch, weight, window, asked.carry, next_batch)
        return self._runner.lower(state, inputs, self._lookup_scope(next_batch)).compile()

    def _lookup_scope(self, next_batch: PyTree | None) -> PrefetchOptions:
        """Return how much of the lookup of `next_batch` the next call does."""
        is_exact = next_batch is None or self._count < self._num_exact
        return PrefetchOptions() if is_exact else self._vectors

    def _request(
        self, ahead: PrefetchOptions, state: TrainState, inputs: StepInputs
    ) -> PrefetchedRows:
        task = Task.create("start_lookup", "carry", ahead=ahead)
        return self._runner.run(task, without_optimizer(state), inputs)

    def _as_pending(self, carry: PrefetchedRows | None, batch: PyTree, state: TrainState) -> Any:
        if carry is None:
            return None
        tables = () if carry.vectors is None else jax.tree.leaves(state.params.tables)
        return PendingLookup(carry, batch, tuple(map(weakref.ref, tables)))


def _check_same_ids(embeddings: Embeddings, looked_up: PyTree, batch: PyTree) -> None:
    """Raise `ValueError` unless both batches look up the same rows; tracers are not compared.

    Communication: none; device to host if they are not the same arrays.
    """
    before, now = jax.tree.leaves(looked_up), jax.tree.leaves(batch)
    if len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True)):
        return
    before, now = embeddings.bags_of(looked_up), embeddings.bags_of(batch)
    for feature in {**before, **now}:
        both = before.get(feature), now.get(feature)
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(both)):
            continue
        if _content(both[0]) != _content(both[1]):
            raise ValueError(
                f"`asked` must be of `prime(state, batch)`, or of the call before with `batch` as "
                f"`next_batch`, got that of other bags of feature {feature!r}."
            )


def _content(tree: PyTree) -> list[Any]:
    """Return the values that this process holds of each array, in a form without their dtypes."""

    def values(x: Any) -> bytes:
        x = np.asarray(x)
        # All negative ids are padding.
        is_ids = np.issubdtype(x.dtype, np.integer)
        return (np.maximum(x.astype(np.int64), -1) if is_ids else x.astype(float)).tobytes()

    def shards(x: Any) -> Any:
        if getattr(x, "is_fully_addressable", True):
            return np.shape(x), values(x)
        return {str(shard.index): values(shard.data) for shard in x.addressable_shards}

    return [shards(x) for x in jax.tree.leaves(tree)]
