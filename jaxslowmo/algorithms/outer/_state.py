"""The state of an outer optimizer, and what it is given by its base and by the inner optimizer."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from ..._support.types import PyTree
from ...transform import Event, Now, Sync


class OuterState(NamedTuple):
    """The state of `slowmo` and `diloco`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    anchor: PyTree  # float32; sharded: tuple of (rows, lanes) shards, else like the parameters
    outer: PyTree  # state of the outer optimizer; `SlowMomentumState` for slowmo
    base: PyTree  # state of the base transform; () without one
    in_flight: PyTree = ()  # `InFlight` with a delay
    sent: PyTree = ()  # `js.spec.Sent` with a codec; of several fragments tuples of all four


class _Alone(Sync):
    """Replicas that train independently between slow steps: it exchanges nothing."""

    owner = "alone"

    @property
    def axes(self) -> tuple[str, ...]:
        return ()

    def init(self, params: PyTree) -> PyTree:
        return ()

    def events(self) -> list[Event]:
        return []

    def counted(self, state: PyTree, now: Now) -> PyTree:
        return state


ALONE = _Alone()
"""The base of an outer optimizer without one."""


NO_RATE = -1.0  # marks a replica that has run out of data, whose optimizer has not counted on


class OuterRate(NamedTuple):
    """The source of the inner learning rate for an outer optimizer.

    Attributes:
      now: `now(count, extra)` returns the rate of an update, from the number of earlier updates and
        the extra arguments of `update`.
      observe: `observe(outer, rate)` returns the outer state after any update at this rate; None
        if it does not change.
      agree: `agree(outer, rate, axes)` returns a state and a rate that are equal on all replicas,
        from rates that differ; the rate of a replica without data is `NO_RATE`. None if rates
        are equal anyway.
      is_passed: whether `update` needs the argument `learning_rate`.
    """

    now: Callable[[jax.Array, Mapping[str, Any]], jax.Array]
    observe: Callable[[Any, jax.Array], Any] | None = None
    agree: Callable[..., tuple[Any, jax.Array]] | None = None
    is_passed: bool = False
