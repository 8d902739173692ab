"""The base class of algorithms that change another one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from .._support.types import PyTree
from ._due import Every
from ._replica_exchange import Exchange
from ._sync import Event, Now, Numerator, Operand, Others, Sync, in_field
from ._transform_states import Carried, StatePlacement


class Wrapper(Sync):
    """An algorithm that wraps another, and acts like it except where a subclass overrides it.

    Attributes:
      base: the algorithm inside.
      state: class of its state, with the fields `count` and `inner`, the state of `base`.
    """

    base: Sync

    @classmethod
    def needs_owner(cls) -> bool:
        """Return False: the state inside says for itself who may convert it."""
        return False

    @property
    def wrapped(self) -> Sync:
        """See `Sync`; so are the following."""
        return self.base

    @property
    def groups(self) -> Sequence[Exchange]:
        return (Exchange(self.base.axes),)

    @property
    def wants_learning_rate(self) -> bool:
        return self.base.wants_learning_rate

    @property
    def has_anchor(self) -> bool:
        return self.base.has_anchor

    @property
    def shards_whole_leaves(self) -> bool:
        return self.base.shards_whole_leaves

    @property
    def shard_specs(self) -> PyTree | None:
        return self.base.shard_specs

    @property
    def stored(self) -> str:
        return self.base.stored

    def events(self) -> Sequence[Event]:
        return [self.lifted(event, "inner") for event in self.base.events()]

    def counted(self, state: PyTree, now: Now) -> PyTree:
        state = super().counted(state, now)
        return state._replace(inner=self.base.counted(state.inner, now))

    def local(self, operand: Operand, now: Now) -> Operand:
        return in_field(self.base.local, "inner", operand, now)

    def numerator(self, state: PyTree, y: PyTree) -> Numerator:
        return self.base.numerator(state.inner, y)

    def reset(self, state: PyTree) -> PyTree:
        return state._replace(inner=self.base.reset(state.inner))

    def settle(self, state: PyTree, move: Callable[[PyTree], PyTree]) -> PyTree:
        return state._replace(inner=self.base.settle(state.inner, move))

    def permit(
        self, state: PyTree, y: PyTree, others: Others, axes: Sequence[str]
    ) -> tuple[Any, PyTree]:
        allowed, inner = self.base.permit(state.inner, y, others, axes)
        return allowed, state._replace(inner=inner)

    def skipped(self, state: PyTree) -> int:
        return self.base.skipped(state.inner)

    @property
    def schedules(self) -> tuple[Every, ...]:
        """The schedules of what it wraps, and those of events that it adds."""
        known = [event.due for event in self.base.events()]
        own = [x.due for x in self._events if isinstance(x.due, Every) and x.due not in known]
        return (*self.base.schedules, *own)

    def sized(self, axis_sizes: Mapping[str, int]) -> Self:
        return self.around(self.base.sized(axis_sizes))

    def on(self, params: PyTree) -> Self:
        base = self.base.on(params)
        return self if base is self.base else self.around(base)

    def with_specs(self, param_specs: PyTree, *, of_state: bool = False) -> Self:
        return self.around(self.base.with_specs(param_specs, of_state=of_state))

    def around(self, base: Sync) -> Self:
        """Return the same around another algorithm, for a subclass that is a dataclass."""
        changed: Any = self
        return replace(changed, base=base)

    def anchor(self, state: PyTree, params: PyTree) -> PyTree:
        return self.base.anchor(state.inner, params)

    def shards(self, state: PyTree) -> list[Any]:
        return self.base.shards(state.inner)

    def division(self, params: PyTree) -> Mapping[str, Any] | None:
        return self.base.division(params)

    def carry(
        self, state: PyTree, params: PyTree, old: StatePlacement, new: StatePlacement
    ) -> Carried:
        carried = self.base.carry(state.inner, params, old, new)
        own = super().carry(state._replace(inner=()), params, old, new).state
        return carried._replace(state=own._replace(inner=carried.state))

    def like_on(self, state: PyTree, params: PyTree, at: StatePlacement) -> PyTree:
        return state._replace(inner=self.base.like_on(state.inner, params, at))

    def shares(self, state: PyTree) -> Sequence[tuple[Any, PyTree | None]] | None:
        return self.base.shares(state.inner)
