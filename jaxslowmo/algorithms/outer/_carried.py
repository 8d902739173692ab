"""The state of an outer optimizer on other meshes, fragment by fragment."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import jax

from ..._support.types import PyTree
from ...transform import Carried, StatePlacement, carry_leaf
from ._fragments import joined, views
from ._state import OuterState

if TYPE_CHECKING:
    from ._outer import Outer


def carried_state(
    turns: Sequence["Outer"],
    state: OuterState,
    params: PyTree,
    old: StatePlacement,
    new: StatePlacement,
) -> Carried:
    """Return the state on another placement; see `CheckpointSpec.carry`."""
    whole = turns[0]
    base = whole.base.carry(state.base, params, old, new)
    first = OuterState(carry_leaf(state.count, old, new), (), (), base.state)
    after = []
    for turn, own in zip(turns, views(turns, state), strict=True):
        places = [_of_fragment(turn, at) for at in (old, new)]
        own_params = turn.fragment.of(params)
        move = functools.partial(turn.anchor.carried, own.anchor, own_params, *places)
        # Replicas' parameters are all the consensus now, and so is what they had taken: averaging
        # again what was averaged changes nothing.
        flight = jax.tree.map(lambda x: carry_leaf(x, old, new), own.in_flight)
        after.append(
            first._replace(anchor=move(own.anchor), outer=move(own.outer), in_flight=flight)
        )
    note = (
        "Each replica had an anchor and slow momentum of its own (`exact_average=False`): they "
        "were averaged."
        if whole.anchor.exchange is None
        else "The anchor and the state of the outer optimizer (slow momentum) are kept exactly."
    )
    return Carried(joined(first, after), (note, *base.notes))


def types_on(
    turns: Sequence["Outer"], state: OuterState, params: PyTree, at: StatePlacement
) -> OuterState:
    """Return the types of the state on placement `at`; see `CheckpointSpec.like_on`."""
    after = []
    for turn, own in zip(turns, views(turns, state), strict=True):
        # Counters have one type on every mesh; trees of the anchor's form are split as it is.
        own_params, place = turn.fragment.of(params), _of_fragment(turn, at)
        like = functools.partial(turn.anchor.like_on, own.anchor, own_params, place)
        after.append(own._replace(anchor=like(own.anchor), outer=like(own.outer)))
    base = turns[0].base.like_on(state.base, params, at)
    return joined(state._replace(base=base), after)


def _of_fragment(turn: "Outer", at: StatePlacement) -> StatePlacement:
    """Return a placement of all parameters as one of this fragment's leaves.

    Raises:
      ValueError: parameters in another form, of which a fragment's leaves tell too little.
    """
    places = turn.fragment.places
    if places is None:
        return at
    if at.form is not None:
        raise ValueError(
            f"{turn.owner}: a state with several `fragments` can't be converted from parameters in "
            "another form (`js.SavedForm`): restore it in the form in which it was saved."
        )
    specs = None if at.specs is None else tuple(at.specs[place] for place in places)
    return replace(at, specs=specs)
