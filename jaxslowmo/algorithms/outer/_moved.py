"""Outer states on other replicas, and divided into other fragments, on the host."""

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from ..._support.types import PyTree
from ...transform import Carried, StatePlacement, Sync, carry_leaf, stacked
from ...tree import at_least_float32
from ._anchor import Anchor, of_form, replaced
from ._delay import NOTHING, InFlight
from ._fragments import Fragment, division_of, fragments_of, joined, of_fragment, views
from ._state import OuterState


class Divided(Sync):
    """An algorithm with an `OuterState`, in one fragment or several.

    Attributes:
      base: the algorithm between slow steps.
      delay: number of updates between taking what is sent and applying its mean.
    """

    base: Sync
    delay: int

    def on(self, params: PyTree) -> Self:
        """Return the algorithm for these parameters, of which only the types matter."""
        raise NotImplementedError

    def divided(self, params: PyTree) -> tuple[Fragment, ...]:
        """Return the fragments of these parameters."""
        raise NotImplementedError

    def anchor_of(self, fragment: Fragment, params: PyTree) -> Anchor:
        """Return the storage of a fragment's anchor."""
        raise NotImplementedError

    def like_on(self, state: OuterState, params: PyTree, at: StatePlacement) -> OuterState:
        """See `Sync.like_on`."""
        # A checkpoint tells how its state was divided; a new run divides by its own arguments.
        outer, fragments = self.on(params), self.fragments_on(params, at)
        own, has_flight = self.divided(params), self.delay > 0
        is_same = fragments == own
        if at.division is not None:
            has_flight = at.division["in_flight"]
        now, parts = views(state, len(own)), []
        for number, fragment in enumerate(fragments):
            leaves, anchor = fragment.of(params), outer.anchor_of(fragment, params)
            part = now[number if is_same else 0]
            if anchor.is_sharded or not is_same:
                # The outer optimizer is the same, so its state differs where it is like the anchor.
                types = anchor.types_on(leaves, of_fragment(self.owner, fragment, at))
                outer_types = replaced(part.anchor, part.outer, lambda _, types=types: types)
                part = part._replace(anchor=types, outer=outer_types)
            if has_flight != (self.delay > 0) or not is_same:
                part = part._replace(in_flight=_flight_types(leaves, at) if has_flight else ())
            parts.append(part)
        base = self.base.like_on(state.base, params, at)
        return joined(state._replace(base=base), parts)

    def carry(
        self, state: OuterState, params: PyTree, old: StatePlacement, new: StatePlacement
    ) -> Carried:
        """See `Sync.carry`."""
        outer, base = self.on(params), self.base.carry(state.base, params, old, new)
        before, after = self.fragments_on(params, old), self.divided(params)
        parts = views(state, len(before))
        is_mean = outer.anchor_of(before[0], params).exchange is None
        note = (
            "Each replica had an anchor and slow momentum of its own (`exact_average=False`): they "
            "were averaged."
            if is_mean
            else "The anchor and the state of the outer optimizer (slow momentum) are kept exactly."
        )
        had_flight = bool(parts[0].in_flight)
        if before == after:
            parts = [
                outer._moved(fragment, part, params, old, new)
                for fragment, part in zip(after, parts, strict=True)
            ]
        else:
            parts = outer._divided_anew(before, after, parts, params, old, new)
            note += f" The number of their fragments changed from {len(before)} to {len(after)}."
        if had_flight != (self.delay > 0) or before != after:
            # What is in flight belongs to a fragment that is no more, or to a delay that has ended.
            # The next slow step takes each leaf's displacement anew, so nothing is lost for good.
            flights = [_no_flight(x.of(params), new) if self.delay else () for x in after]
            parts = [x._replace(in_flight=f) for x, f in zip(parts, flights, strict=True)]
            note += " What was in flight is dropped." if had_flight else ""
        count = carry_leaf(state.count, old, new)
        moved = joined(parts[0]._replace(count=count, base=base.state), parts)
        return Carried(moved, (note, *base.notes))

    def division(self, params: PyTree) -> dict[str, Any]:
        """See `Sync.division`."""
        return division_of(self.divided(params), has_flight=self.delay > 0)

    def fragments_on(self, params: PyTree, at: StatePlacement) -> tuple[Fragment, ...]:
        """Return the fragments of a state on placement `at`; its own ones for a new run."""
        return self.divided(params) if at.division is None else fragments_of(at.division)

    def _moved(
        self,
        fragment: Fragment,
        part: OuterState,
        params: PyTree,
        old: StatePlacement,
        new: StatePlacement,
    ) -> OuterState:
        """Return the state of one fragment on another placement."""
        old_place, new_place = (of_fragment(self.owner, fragment, at) for at in (old, new))
        anchor, leaves = self.anchor_of(fragment, params), fragment.of(params)
        # Replicas' parameters are all the consensus now, and so is what they had taken: averaging
        # again what was averaged changes nothing.
        return part._replace(
            anchor=anchor.carried(part.anchor, leaves, old_place, new_place, part.anchor),
            outer=anchor.carried(part.anchor, leaves, old_place, new_place, part.outer),
            in_flight=jax.tree.map(lambda x: carry_leaf(x, old, new), part.in_flight),
        )

    def _divided_anew(
        self,
        before: Sequence[Fragment],
        after: Sequence[Fragment],
        parts: Sequence[OuterState],
        params: PyTree,
        old: StatePlacement,
        new: StatePlacement,
    ) -> list[OuterState]:
        """Return the states of the new fragments, from those of the old ones."""
        # Of every tree like the anchor, such as momentum, each leaf by its position.
        tables: list[dict[int, np.ndarray]] = []
        home: dict[int, OuterState] = {}
        shapes = [x.shape for x in jax.tree.leaves(params)]
        for fragment, anchor, part in zip(
            before, [self.anchor_of(x, params) for x in before], parts, strict=True
        ):
            leaves, place = fragment.of(params), of_fragment(self.owner, fragment, old)
            places = _places(fragment, params)
            home.update(dict.fromkeys(places, part))
            for number, tree in enumerate(_alike(part)):
                tables += [{} for _ in range(number + 1 - len(tables))]
                values = jax.tree.leaves(anchor.join(tree, leaves, place))
                for i, value in zip(places, values, strict=True):
                    leaf = tables[number].setdefault(i, np.empty(shapes[i], value.dtype))
                    leaf[(..., fragment.part_of(leaf)) if fragment.count > 1 else ...] = value
        # Counters of a new fragment are those of the one that its first leaf was in. Fragments take
        # slow steps in turn, so their counters differ by one at most.
        moved = []
        for fragment, anchor in zip(after, [self.anchor_of(x, params) for x in after], strict=True):
            leaves, place = fragment.of(params), of_fragment(self.owner, fragment, new)
            places = _places(fragment, params)
            cut = [
                anchor.split(
                    jax.tree.structure(leaves).unflatten([fragment.cut(table[i]) for i in places]),
                    leaves,
                    place,
                )
                for table in tables
            ]
            rest, part = iter(cut[1:]), home[places[0]]
            outer_state = replaced(
                part.anchor,
                part.outer,
                lambda _, rest=rest: next(rest),
                lambda x: carry_leaf(x, old, new),
            )
            moved.append(part._replace(anchor=cut[0], outer=outer_state))
        return moved


def _alike(part: OuterState) -> list[PyTree]:
    """Return the anchor of a fragment, and the trees like it in its outer state."""
    is_alike = of_form(part.anchor)
    trees = jax.tree.leaves(part.outer, is_leaf=is_alike)
    return [part.anchor, *filter(is_alike, trees)]


def _places(fragment: Fragment, params: PyTree) -> Sequence[int]:
    return range(len(jax.tree.leaves(params))) if fragment.places is None else fragment.places


def _flight_types(leaves: PyTree, at: StatePlacement) -> InFlight:
    def of(x: Any, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((at.replicas, *x.shape), dtype)

    one = jax.ShapeDtypeStruct((at.replicas,), jnp.float32)
    values = jax.tree.map(lambda x: of(x, at_least_float32(x.dtype)), leaves)
    parts = jax.ShapeDtypeStruct((at.replicas,), jnp.int32)
    return InFlight(*[values, one, one, parts])


def _no_flight(leaves: PyTree, new: StatePlacement) -> InFlight:
    types = _flight_types(leaves, new)
    values = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), types.values)
    # Its marks say that there is nothing, so zeros are never read.
    one = stacked(np.ones([], np.float32), new)
    return InFlight(values, one, one, stacked(np.full([], NOTHING, np.int32), new))
