"""Outer states on other replicas, and divided into other fragments, on the host."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._support.types import PyTree
from ...transform import (
    Carried,
    Sent,
    StatePlacement,
    Sync,
    carried_sent,
    carry_leaf,
    has_leaves,
    replica_average,
    sent_with,
    stacked,
    wide_types_on,
)
from ...tree import of_form, replaced
from ._anchor import Anchor
from ._delay import NOTHING, InFlight
from ._fragments import Fragment, division_of, fragments_of, joined, of_fragment, views
from ._state import OuterState


class Divided(Sync):
    """An algorithm with an `OuterState`, in one fragment or several.

    Attributes:
      base: the algorithm between slow steps.
      delay: number of updates between taking what is sent and applying its mean.
      counts: the numbers of fragments of the models for which a state was made.
    """

    base: Sync
    delay: int
    counts: set[int]

    def divided(self, params: PyTree) -> tuple[Fragment, ...]:
        """Return the fragments of these parameters."""
        raise NotImplementedError

    def anchor_of(self, fragment: Fragment, params: PyTree) -> Anchor:
        """Return the storage of a fragment's anchor."""
        raise NotImplementedError

    @property
    def sent_names(self) -> list[str] | None:
        """The fields of `Sent` that the state has; None without a codec."""
        raise NotImplementedError

    def like_on(self, state: OuterState, params: PyTree, at: StatePlacement) -> OuterState:
        """See `Sync.like_on`."""
        # A checkpoint tells how its state was divided; a new run divides by its own arguments.
        outer, fragments = self.on(params), self.fragments_on(params, at)
        own, has_flight = self.divided(params), self.delay > 0
        is_same = fragments == own
        now, parts = views(state, len(own)), []
        names = outer.sent_names
        if at.division is not None:
            has_flight, names = at.division.get("in_flight"), at.division.get("sent")
        for number, fragment in enumerate(fragments):
            leaves, anchor = fragment.of(params), outer.anchor_of(fragment, params)
            part = now[number if is_same else 0]
            if anchor.is_sharded or not is_same:
                # The outer optimizer is the same, so its state differs where it is like the anchor.
                types = anchor.types_on(leaves, of_fragment(self.owner, fragment, at))
                outer_types = replaced(part.anchor, part.outer, lambda _, types=types: types)
                part = part._replace(anchor=types, outer=outer_types)
            flight = _flight_types(leaves, at, names) if has_flight else ()
            sent = sent_with(names, lambda _, leaves=leaves: wide_types_on(leaves, at))
            parts.append(part._replace(in_flight=flight, sent=sent))
        base = self.base.like_on(state.base, params, _of_base(at))
        return joined(state._replace(base=base), parts)

    def carry(
        self, state: OuterState, params: PyTree, old: StatePlacement, new: StatePlacement
    ) -> Carried:
        """See `Sync.carry`."""
        outer = self.on(params)
        base = self.base.carry(state.base, params, _of_base(old), new)
        before, after = self.fragments_on(params, old), self.divided(params)
        parts = views(state, len(before))
        is_mean = outer.anchor_of(before[0], params).exchange is None
        notes = []
        if old.replicas != new.replicas:
            notes.append(
                "Each replica had an anchor and slow momentum of its own (`exact_average=False`): "
                "they were averaged."
                if is_mean
                else "The anchor and the state of the outer optimizer (slow momentum) are kept "
                "exactly."
            )
        had_flight, names = bool(parts[0].in_flight), outer.sent_names
        had_names = names if old.division is None else old.division.get("sent")
        if before == after:
            parts = [
                outer._moved(fragment, part, params, old, new)
                for fragment, part in zip(after, parts, strict=True)
            ]
        else:
            parts = outer._divided_anew(before, after, parts, params, old, new)
            notes.append(f"The number of fragments changed from {len(before)} to {len(after)}.")
        if had_flight != (self.delay > 0) or before != after or had_names != names:
            # What is in flight belongs to a fragment that is no more, or to a delay that has ended,
            # or a codec had made it.
            # The next slow step takes each leaf's displacement anew, so nothing is lost for good.
            flights = [_no_flight(x.of(params), new, names) if self.delay else () for x in after]
            parts = [x._replace(in_flight=f) for x, f in zip(parts, flights, strict=True)]
            notes += ["What was in flight is dropped."] if had_flight else []
        fragments = zip(after, parts, strict=True)
        changed = [outer._remembering(names, x, part, params, new) for x, part in fragments]
        parts, notes = [part for part, _ in changed], [*notes, *changed[0][1]]
        count = carry_leaf(state.count, old, new)
        moved = joined(parts[0]._replace(count=count, base=base.state), parts)
        return Carried(moved, (*notes, *base.notes))

    def division(self, params: PyTree) -> dict[str, Any]:
        """See `Sync.division`."""
        self.counts.clear()  # a step asks, when it goes on with a state of another model
        names = self.on(params).sent_names
        own = division_of(self.divided(params), has_flight=self.delay > 0, sent=names)
        base = self.base.division(params)
        return own | ({"base": base} if base else {})

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
            # The mean of what replicas have not sent stays, and so does the sum of equal shares.
            sent=jax.tree.map(lambda x: carry_leaf(x, old, new), part.sent),
        )

    def _remembering(
        self,
        names: Sequence[str] | None,
        fragment: Fragment,
        part: OuterState,
        params: PyTree,
        new: StatePlacement,
    ) -> tuple[OuterState, list[str]]:
        """Return the state of a fragment with these fields of `Sent`, and what was dropped."""
        leaves, place = fragment.of(params), of_fragment(self.owner, fragment, new)

        def view() -> PyTree:
            return self.anchor_of(fragment, params).join(part.anchor, leaves, place)

        sent, notes = carried_sent(part.sent, names, leaves, new, view)
        return part._replace(sent=sent), notes

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
        names = [n for n in Sent._fields if parts[0].sent and has_leaves(getattr(parts[0].sent, n))]
        for fragment, anchor, part in zip(
            before, [self.anchor_of(x, params) for x in before], parts, strict=True
        ):
            leaves, place = fragment.of(params), of_fragment(self.owner, fragment, old)
            places = _places(fragment, params)
            home.update(dict.fromkeys(places, part))
            trees = [anchor.join(tree, leaves, place) for tree in _alike(part)]
            trees += [jax.tree.map(replica_average, getattr(part.sent, n)) for n in names]
            for number, tree in enumerate(trees):
                tables += [{} for _ in range(number + 1 - len(tables))]
                values = jax.tree.leaves(tree)
                for i, value in zip(places, values, strict=True):
                    leaf = tables[number].setdefault(i, np.empty(shapes[i], value.dtype))
                    leaf[(..., fragment.part_of(leaf)) if fragment.count > 1 else ...] = value
        # Counters of a new fragment are those of the one that its first leaf was in. Fragments take
        # slow steps in turn, so their counters differ by one at most.
        moved = []
        for fragment, anchor in zip(after, [self.anchor_of(x, params) for x in after], strict=True):
            leaves, place = fragment.of(params), of_fragment(self.owner, fragment, new)
            places = _places(fragment, params)
            structure, part = jax.tree.structure(leaves), home[places[0]]
            trees = [structure.unflatten([fragment.cut(x[i]) for i in places]) for x in tables]
            ends = len(trees) - len(names)
            cut = [anchor.split(tree, leaves, place) for tree in trees[:ends]]
            held = [jax.tree.map(lambda x: stacked(x, new), tree) for tree in trees[ends:]]
            rest, sent = iter(cut[1:]), dict(zip(names, held, strict=True))
            outer_state = replaced(
                part.anchor,
                part.outer,
                lambda _, rest=rest: next(rest),
                lambda x: carry_leaf(x, old, new),
            )
            part = part._replace(anchor=cut[0], outer=outer_state)
            moved.append(part._replace(sent=sent_with(names, sent.__getitem__)))
        return moved


def _of_base(at: StatePlacement) -> StatePlacement:
    return replace(at, division=None if at.division is None else at.division.get("base", {}))


def _alike(part: OuterState) -> list[PyTree]:
    """Return the anchor of a fragment, and the trees like it in its outer state."""
    is_alike = of_form(part.anchor)
    trees = jax.tree.leaves(part.outer, is_leaf=is_alike)
    return [part.anchor, *filter(is_alike, trees)]


def _places(fragment: Fragment, params: PyTree) -> Sequence[int]:
    return range(len(jax.tree.leaves(params))) if fragment.places is None else fragment.places


def _flight_types(leaves: PyTree, at: StatePlacement, names: Sequence[str] | None) -> InFlight:
    values, one = wide_types_on(leaves, at), jax.ShapeDtypeStruct((at.replicas,), jnp.float32)
    parts = jax.ShapeDtypeStruct((at.replicas,), jnp.int32)
    lost = values if "lost" in (names or ()) else ()
    return InFlight(*[values, one, one, parts, lost])


def _no_flight(leaves: PyTree, new: StatePlacement, names: Sequence[str] | None) -> InFlight:
    types = _flight_types(leaves, new, names)
    values, lost = (
        jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)
        for tree in (types.values, types.lost)
    )
    # Its marks say that there is nothing, so zeros are never read.
    one = stacked(np.ones([], np.float32), new)
    return InFlight(values, one, one, stacked(np.full([], NOTHING, np.int32), new), lost)
