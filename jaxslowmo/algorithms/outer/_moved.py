"""Outer states on other replicas, and divided into other fragments, on the host."""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ..._support.types import PyTree
from ...transform import Carried, StatePlacement, Sync, carry_leaf, stacked
from ...tree import at_least_float32
from ._anchor import Anchor, of_form, replaced
from ._delay import NOTHING, InFlight
from ._fragments import Fragment, fragments_named, joined, keys_of, of_fragment, views
from ._state import OuterState


class Divided(Protocol):
    """The parts of an outer optimizer that a move of its state needs; see `Outer`."""

    @property
    def owner(self) -> str: ...

    @property
    def base(self) -> Sync: ...

    @property
    def delay(self) -> int: ...

    def divided(self, params: PyTree) -> tuple[Fragment, ...]: ...

    def anchor_of(self, fragment: Fragment, params: PyTree) -> Anchor: ...


def like_on(outer: Divided, state: OuterState, params: PyTree, at: StatePlacement) -> OuterState:
    """Return the types of a state on placement `at`; see `Sync.like_on`."""
    base = outer.base.like_on(state.base, params, at.inside("base"))
    # A checkpoint tells by the names of its leaves how it was divided. On a placement without names
    # a new run divides by its own arguments.
    new_fragments, old_fragments = outer.divided(params), _fragments(outer, params, at)
    current_parts = views(state._replace(base=base), keys_of(new_fragments))
    has_flight = any(name.startswith("in_flight/") for name in _own_names(at))
    parts: list[OuterState] = []
    for number, fragment in enumerate(old_fragments):
        leaves, place = fragment.of(params), of_fragment(outer.owner, fragment, at)
        anchor = outer.anchor_of(fragment, params)
        if old_fragments == new_fragments:
            part = current_parts[number]
            like = functools.partial(anchor.like_on, part.anchor, leaves, place)
            part = part._replace(anchor=like(part.anchor), outer=like(part.outer))
        else:
            # The outer optimizer is the same, so its state differs where it is like the anchor.
            part, types = current_parts[0], anchor.types_on(leaves, place)
            outer_types = replaced(part.anchor, part.outer, lambda _, types=types: types)
            part = part._replace(anchor=types, outer=outer_types)
        # Without a delay a state has no leaves for what is in flight.
        if (at.names and has_flight != (outer.delay > 0)) or old_fragments != new_fragments:
            part = part._replace(in_flight=_flight_types(leaves, at) if has_flight else ())
        parts.append(part)
    return joined(state._replace(base=base), parts, keys_of(old_fragments))


def carried(
    outer: Divided, state: OuterState, params: PyTree, old: StatePlacement, new: StatePlacement
) -> Carried:
    """Return a state on another placement; see `Sync.carry`."""
    base = outer.base.carry(state.base, params, old.inside("base"), new.inside("base"))
    new_fragments, old_fragments = outer.divided(params), _fragments(outer, params, old)
    count, parts = carry_leaf(state.count, old, new), views(state, keys_of(old_fragments))
    anchors = _anchors(outer, old_fragments, params)
    note = (
        "Each replica had an anchor and slow momentum of its own (`exact_average=False`): they "
        "were averaged."
        if anchors[0].exchange is None
        else "The anchor and the state of the outer optimizer (slow momentum) are kept exactly."
    )
    if old_fragments == new_fragments:
        after = [
            _on(outer, fragment, anchor, part, params, old, new)
            for fragment, anchor, part in zip(new_fragments, anchors, parts, strict=True)
        ]
    else:
        after = _divided_anew(outer, old_fragments, new_fragments, parts, params, old, new)
        counts = f"{len(old_fragments)} to {len(new_fragments)}"
        note += f" The number of their fragments changed from {counts}."
    if bool(parts[0].in_flight) != (outer.delay > 0) or old_fragments != new_fragments:
        # What is in flight belongs to a fragment that is no more, or to a delay that has ended. The
        # next slow step takes each leaf's displacement anew, so training loses nothing for good.
        flights = [_no_flight(fragment.of(params), new) for fragment in new_fragments]
        after = [
            part._replace(in_flight=flight if outer.delay else ())
            for part, flight in zip(after, flights, strict=True)
        ]
        if parts[0].in_flight:
            note += " What was in flight is dropped."
    outer_state = joined(
        after[0]._replace(count=count, base=base.state), after, keys_of(new_fragments)
    )
    return Carried(outer_state, (note, *base.notes))


def _on(
    outer: Divided,
    fragment: Fragment,
    anchor: Anchor,
    part: OuterState,
    params: PyTree,
    old: StatePlacement,
    new: StatePlacement,
) -> OuterState:
    """Return the state of one fragment on another placement."""
    places = [of_fragment(outer.owner, fragment, at) for at in (old, new)]
    move = functools.partial(anchor.carried, part.anchor, fragment.of(params), *places)
    # Replicas' parameters are all the consensus now, and so is what they had taken: averaging again
    # what was averaged changes nothing.
    flight = jax.tree.map(lambda x: carry_leaf(x, old, new), part.in_flight)
    return part._replace(anchor=move(part.anchor), outer=move(part.outer), in_flight=flight)


def _divided_anew(
    outer: Divided,
    old_fragments: Sequence[Fragment],
    new_fragments: Sequence[Fragment],
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
        old_fragments, _anchors(outer, old_fragments, params), parts, strict=True
    ):
        leaves, place = fragment.of(params), of_fragment(outer.owner, fragment, old)
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
    after = []
    for fragment, anchor in zip(new_fragments, _anchors(outer, new_fragments, params), strict=True):
        leaves, place = fragment.of(params), of_fragment(outer.owner, fragment, new)
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
        after.append(part._replace(anchor=cut[0], outer=outer_state))
    return after


def _alike(part: OuterState) -> list[PyTree]:
    """Return the anchor of a fragment, and the trees like it in its outer state."""
    is_alike = of_form(part.anchor)
    trees = jax.tree.leaves(part.outer, is_leaf=is_alike)
    return [part.anchor, *filter(is_alike, trees)]


def _places(fragment: Fragment, params: PyTree) -> Sequence[int]:
    return range(len(jax.tree.leaves(params))) if fragment.places is None else fragment.places


def _anchors(outer: Divided, fragments: Sequence[Fragment], params: PyTree) -> list[Anchor]:
    return [outer.anchor_of(fragment, params) for fragment in fragments]


def _fragments(outer: Divided, params: PyTree, at: StatePlacement) -> tuple[Fragment, ...]:
    """Return the fragments of a state on placement `at`; those of `outer` for a new run."""
    names = [name.removeprefix("anchor/") for name in _own_names(at) if name.startswith("anchor/")]
    if not names:
        return outer.divided(params)
    return fragments_named(names, len(jax.tree.leaves(params)))


def _own_names(at: StatePlacement) -> list[str]:
    """Return the names of leaves of the outermost outer state, from its fields on."""
    # A base may have an anchor of its own, whose names stand behind "base".
    names = []
    for name in at.names:
        parts = name.split("/")
        first = next((i for i, x in enumerate(parts) if x in ("anchor", "in_flight", "base")), None)
        if first is not None and parts[first] != "base":
            names.append("/".join(parts[first:]))
    return names


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
