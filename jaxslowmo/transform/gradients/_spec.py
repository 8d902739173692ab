"""What a gradient transform says of itself, and what several say together."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import optax

from ..._typing import PyTree
from .._due import Communicate, decide, either

TAKEN = frozenset({"weight", "ready_order", "param_specs", "validation", "finite", "unscaled"})


class Reduction(NamedTuple):
    """One way in which an update may reduce gradients.

    Attributes:
      axes: mapped axes that it reduces over.
      due: whether the coming update does: a bool where that is static, else a () bool array that is
        equal on all replicas.
    """

    axes: tuple[str, ...]
    due: Communicate


def _always(state: PyTree) -> bool:
    del state
    return True


def _nothing(state: PyTree) -> list[PyTree]:
    del state
    return []


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientSpec:
    """What a gradient transform says, beside optax's pair, to other transforms and to the step.

    Attributes:
      axes: names of the mapped axes over which some update reduces gradients.
      due: `due(state)`: whether the coming update reduces, from the state of one replica before it:
        a bool, or a () bool array that is equal on all replicas.
      takes: which of "weight", "ready_order", "param_specs", "validation", "finite" and "unscaled"
        its `update` listens to.
      clips: whether it clips.
      skips: whether it may drop an update.
      returns_updates: whether it holds an optimizer, so that what it returns are updates of
        parameters, and no gradients any more.
      of_rows: whether gradients of rows of tables may be beside those of dense parameters, which it
        then treats alike.
      reductions: `reductions(state)`: all ways in which updates reduce, one after the other, as
        pairs (axes, due). None: over `axes` where `due`.
      unknown: `unknown(state)`: the states of transforms that it holds and that say nothing of
        themselves, such as those of optax.

    Raises:
      ValueError: `takes` that holds another word.
    """

    axes: tuple[str, ...] = ()
    due: Callable[[PyTree], Communicate] = _always
    takes: frozenset[str] = frozenset()
    clips: bool = False
    skips: bool = False
    returns_updates: bool = False
    of_rows: bool = False
    reductions: Callable[[PyTree], Sequence[Reduction]] | None = None
    unknown: Callable[[PyTree], list[PyTree]] = _nothing

    def __post_init__(self) -> None:
        """Raise `ValueError` for words that no step says."""
        if unheard := sorted(set(self.takes) - TAKEN):
            raise ValueError(
                f"GradientSpec: `takes` must be words of {sorted(TAKEN)}, got {unheard}."
            )

    def reductions_of(self, state: PyTree) -> list[Reduction]:
        """Return the ways in which the coming update may reduce gradients, in order."""
        # What the transforms inside say, each of its own part of the state.
        if self.reductions is not None:
            return [Reduction(*each) for each in self.reductions(state)]
        return [Reduction(self.axes, self.due(state))] if self.axes else []

    def around(
        self,
        inner: Callable[[Any], PyTree],
        due: Callable[[Any], Communicate] = _always,
        **own: Any,
    ) -> "GradientSpec":
        """Return what a transform says that holds the one of this spec.

        Args:
          inner: of its state, the state of the one that it holds.
          due: of its state, whether the coming update calls that one.
          **own: what it says itself, in place of what the inner one says.
        """

        def reductions(state: PyTree) -> list[Reduction]:
            called = due(state)
            every = self.reductions_of(inner(state))
            return [
                Reduction(x.axes, called if x.due is True else decide(x.due, called)) for x in every
            ]

        # The axes stay those of all updates; which of them reduces is asked of the state.
        return dataclasses.replace(
            self,
            reductions=reductions,
            due=lambda state: _any_due(reductions(state)),
            unknown=lambda state: self.unknown(inner(state)),
            **own,
        )


def _any_due(reductions: Sequence[Reduction]) -> Communicate:
    return reduce(either, [each.due for each in reductions], False)


# Of a transform that says nothing of itself; it may be an optimizer.
_UNKNOWN = GradientSpec(returns_updates=True, unknown=lambda state: [state])


def spec_of(transform: optax.GradientTransformation) -> GradientSpec:
    """Return the spec of a gradient transform; of others one that says nothing."""
    # A parameter transform has a spec, too, of another kind.
    spec = getattr(transform, "spec", None)
    return spec if isinstance(spec, GradientSpec) else _UNKNOWN


def joined(specs: Sequence[GradientSpec]) -> GradientSpec:
    """Return what a chain says of transforms with these specs, its state a tuple of theirs."""

    def reductions(state: PyTree) -> list[Reduction]:
        pairs = zip(specs, state, strict=True)
        return [each for spec, own in pairs for each in spec.reductions_of(own)]

    # One part that clips, skips or makes updates is enough; rows must pass through all of them.
    return GradientSpec(
        axes=tuple(dict.fromkeys(axis for spec in specs for axis in spec.axes)),
        due=lambda state: _any_due(reductions(state)),
        takes=frozenset[str]().union(*(spec.takes for spec in specs)),
        clips=any(spec.clips for spec in specs),
        skips=any(spec.skips for spec in specs),
        returns_updates=any(spec.returns_updates for spec in specs),
        of_rows=all(spec.of_rows for spec in specs),
        reductions=reductions,
        unknown=lambda state: [
            x for spec, own in zip(specs, state, strict=True) for x in spec.unknown(own)
        ],
    )


def is_identity(transform: optax.GradientTransformation) -> bool:
    """Return whether a transform returns what it is given, tried with an object of no other use."""
    # No array, so that nothing can be computed with it.
    leaf: Any = object()
    try:
        return transform.update(leaf, transform.init(leaf), leaf)[0] is leaf
    except Exception:  # It computes with its gradients.
        return False
