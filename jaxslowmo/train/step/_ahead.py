"""A step that asks the tables for the next batch beside its own work."""

import weakref
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from ..._support.checks import as_int, check_choice
from ..._support.types import PyTree
from ...embedding import Ahead, Carry, Embeddings
from .._train_state import TrainState
from ._step_programs import Task, ask
from ._step_runner import Runner
from .update import AnyLookup, Given, GradientWindow, Metrics

AheadMode = Literal["exact", "stale", "patched"]


class Asked(NamedTuple):
    """What was asked of the tables for one batch, before its own step.

    Attributes:
      carry: on the devices.
      batch: the one that was asked for, as it was placed.
      tables: the arrays of the state that the rows are for; () where there are none yet.
    """

    carry: Carry
    batch: PyTree
    tables: tuple[weakref.ref[Any], ...]

    def is_of(self, state: TrainState, lookup: AnyLookup) -> bool:
        """Whether the rows are those of this very state, no older or newer one."""
        if self.carry.vectors is None:
            return True
        own = jax.tree.leaves(lookup.stored(state.params))
        return all(ref() is x for ref, x in zip(self.tables, own, strict=True))


class AheadStep:
    """A training step beside which the next batch's tables are asked; made by `step.ahead`.

        asked = ahead.prime(state, first)
        state, metrics, asked = ahead(state, first, asked, second)
        state, metrics, asked = ahead(state, second, asked, None)

    Args:
      runner: of the step.
      mode: `"exact"`: row numbers are exchanged beside the step before, rows looked up and sent in
        the batch's own. `"stale"`: rows, too, as they were before that step: one update stale.
        `"patched"`: likewise, and those that the step changes are sent again: as exact, bit for bit
        on CPU.
      num_exact: batches of `"stale"` that begin exactly.
      room: of `"patched"`: the part of the slots for rows that can be sent again; where they do not
        fit, all are looked up again.

    Raises:
      ValueError: a step without `embeddings`; another mode; num_exact < 0, or for another mode than
        `"stale"`; room outside of 0 to 1.
    """

    def __init__(
        self, runner: Runner, mode: AheadMode, num_exact: int = 0, room: float = 0.25
    ) -> None:
        self._embeddings = _checked(runner, mode, num_exact, room)
        self._runner, self.mode, self._num_exact = runner, mode, int(num_exact)
        self._vectors = Ahead(mode != "exact", mode == "patched", room)
        self._count = 0

    def prime(self, state: TrainState, batch: PyTree) -> Asked:
        """Asks for a batch whose turn it is, beside nothing.

        Communication: that of `Embeddings.exchange_ids`, and of `Embeddings.lookup` where this
          batch is one that is looked up ahead.
        """
        self._runner.refuse(state)
        given = Given(*self._runner.place(state, batch))
        carry = self._ask(ask(self.asks_for(given.batch)), state, given)
        self._count += 1
        return self._asked(carry, given.batch, state)

    def __call__(
        self,
        state: TrainState,
        batch: PyTree,
        asked: Asked,
        next_batch: PyTree | None,
        weight: Any = None,
        window: GradientWindow | None = None,
        collect: bool = False,
        num_batches: int = 0,
    ) -> tuple[Any, Metrics, Asked | None]:
        """`step` of a batch, or `step.collect`, and beside it what the next one asks for.

        Args:
          state: as the step takes it. If its tables are not those that the step before has left,
            such as after a rollback, rows are looked up in them first.
          batch: the one that was asked for.
          asked: what `prime` or the call before returned for this batch.
          next_batch: None: nothing is asked for.
          weight: of `batch`.
          window: as the step takes it.
          collect: gather gradients alone.
          num_batches: as `step.collect` takes it.

        Returns:
          `(state, metrics, asked)`, or with `collect` `(window, metrics, asked)`. With
          `"patched"` metrics hold `embeddings/NAME/resent` besides.

        Raises:
          ValueError: as the step; what was asked for a batch with other ids or weights of bags.
            Arrays of jax that are the same objects need no look; others are compared on the host,
            before anything runs. Inside of jax.jit nothing is compared.

        Communication: the step's, that of `Embeddings.exchange_ids` and, but in `"exact"`, of
          `Embeddings.lookup` for the next batch, in place of its own; with `"patched"`, per table,
          two all-to-alls of the row numbers and rows that are sent again.
        """
        if not isinstance(asked, Asked):
            raise ValueError(
                "`asked` must be what `prime(state, batch)` or the call before returned for this "
                f"batch, got {type(asked).__name__}."
            )
        runner = self._runner
        runner.refuse(state)
        runner.refuse_window(window, state, weight)
        batch, weight = runner.place(state, batch, weight)
        _refuse_other_ids(self._embeddings, asked.batch, batch)
        if next_batch is not None:
            next_batch, _ = runner.place(state, next_batch)
        ahead = self.asks_for(next_batch)
        self._count += next_batch is not None
        if not asked.is_of(state, runner.parts.lookup):
            anew = self._ask(ask(Ahead(vectors=True)), state, Given(carry=asked.carry))
            asked = self._asked(anew, batch, state)
        given = Given(batch, weight, window, asked.carry, next_batch)
        if collect:
            done, metrics, carry = runner.collect(state, given, num_batches, ahead)
            return done, metrics, self._asked(carry, next_batch, state)
        done, metrics, carry = runner.update(state, given, ahead)
        return done, metrics, self._asked(carry, next_batch, done)

    def compiled(
        self,
        state: TrainState,
        batch: PyTree,
        asked: Asked,
        next_batch: PyTree | None,
        weight: Any = None,
        window: GradientWindow | None = None,
    ) -> jax.stages.Compiled:
        """What such a call runs for an update, compiled now if it was not; nothing runs."""
        given = Given(batch, weight, window, asked.carry, next_batch)
        return self._runner.compiled(state, given, self.asks_for(next_batch))

    def asks_for(self, next_batch: PyTree | None) -> Ahead:
        """How much the next call does for the batch after its own."""
        is_exact = next_batch is None or self._count < self._num_exact
        return Ahead() if is_exact else self._vectors

    def _ask(self, task: Task, state: TrainState, given: Given) -> Carry:
        layout = self._runner.layouts.of(state)
        return self._runner.run(task, layout, state._replace(opt_state=()), given)

    def _asked(self, carry: Carry | None, batch: PyTree, state: TrainState) -> Any:
        if carry is None:
            return None
        stored = self._runner.parts.lookup.stored(state.params)
        tables = () if carry.vectors is None else jax.tree.leaves(stored)
        return Asked(carry, batch, tuple(map(weakref.ref, tables)))


def _refuse_other_ids(embeddings: Embeddings, asked_for: PyTree, batch: PyTree) -> None:
    """Raise `ValueError` unless both batches look up the same; what is traced is not compared.

    Communication: none; device to host where they are not the same arrays.
    """
    before, now = jax.tree.leaves(asked_for), jax.tree.leaves(batch)
    if len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True)):
        return
    before, now = embeddings.bags_of(asked_for), embeddings.bags_of(batch)
    for feature in {**before, **now}:
        both = before.get(feature), now.get(feature)
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(both)):
            continue
        if _content(both[0]) != _content(both[1]):
            raise ValueError(
                f"`asked` is for another batch: its bags of feature {feature!r} are not those of "
                "`batch`. Give each batch what `prime(state, batch)` returned for it, or the call "
                "before, whose `next_batch` it was."
            )


def _content(tree: PyTree) -> list[Any]:
    """Return the values that this process holds of each array, whatever their dtypes."""

    def values(x: Any) -> bytes:
        x = np.asarray(x)
        # All negative ids are padding.
        is_ids = np.issubdtype(x.dtype, np.integer)
        return (np.maximum(x.astype(np.int64), -1) if is_ids else x.astype(float)).tobytes()

    def parts(x: Any) -> Any:
        if getattr(x, "is_fully_addressable", True):
            return np.shape(x), values(x)
        return {str(part.index): values(part.data) for part in x.addressable_shards}

    return [parts(x) for x in jax.tree.leaves(tree)]


def _checked(runner: Runner, mode: Any, num_exact: Any, room: Any) -> Embeddings:
    """The tables of a step that asks ahead of it; `ValueError` for arguments that cannot be."""
    check_choice("mode", mode, AheadMode)
    if runner.embeddings is None:
        raise ValueError(
            f"`mode`={mode!r} is about the tables of a step, and this one has none: make it with "
            "js.make_train_step(embeddings=...)."
        )
    if as_int(num_exact, 0) is None:
        raise ValueError(f"`num_exact` counts batches and must be >= 0, got {num_exact!r}.")
    if num_exact and mode != "stale":
        raise ValueError(
            f'`num_exact` is for `mode`="stale", of which the first batches can be exact; got '
            f"{num_exact} with {mode!r}."
        )
    is_number = isinstance(room, int | float) and not isinstance(room, bool)
    if not is_number or not 0 < room <= 1:
        raise ValueError(f"`room` must be a number above 0 and at most 1, got {room!r}.")
    return runner.embeddings
