"""Fragments: parts of a model whose slow steps are due at different times of one period."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax

from ..._support.types import PyTree
from ...mesh import specs_of_leaves
from ...transform import Every, Exchange, StatePlacement
from ...tree import Staged, leaf_names, parts_of
from ._state import OuterState

TAKE, SEND, SLOW = "take", "send", "slow"  # the first two with a delay

Fragments = int | Callable[[str], int]
"""The number of fragments, or a function from a leaf's name to the number of its fragment."""


@dataclass(frozen=True)
class Fragment:
    """The leaves of one fragment.

    Attributes:
      number: number of the fragment, from 0.
      places: positions of its leaves among those of the parameters; None: all leaves.
      count: the number of parts into which the last dimension of each leaf is cut, of which this
        fragment has the one of its own number; 1: it has whole leaves.
    """

    number: int = 0
    places: tuple[int, ...] | None = None
    count: int = 1

    def of(self, tree: PyTree) -> Any:
        """Return the fragment's leaves of a tree.

        The result has the structure of `tree`, with `optax.MaskedNode()` in the place of leaves of
        other fragments, so that an optimizer sees the names of the leaves. Of buffers of stages,
        whose names say nothing, it is a list.
        """
        if self.places is None:
            return tree
        leaves = jax.tree.leaves(tree)
        return self.like(tree, [self.cut(leaves[place]) for place in self.places])

    def like(self, tree: PyTree, leaves: list[Any]) -> Any:
        """Return these values, one for each of the fragment's leaves, in the form of `of(tree)`."""
        if self.places is None or parts_of(tree, Staged):
            return leaves
        structure = jax.tree.structure(tree)
        nodes: list[Any] = [optax.MaskedNode()] * structure.num_leaves
        for place, leaf in zip(self.places, leaves, strict=True):
            nodes[place] = leaf
        return structure.unflatten(nodes)

    def cut(self, x: Any) -> Any:
        """Return the fragment's part of a leaf, an array or its type."""
        if self.count == 1:
            return x
        part = self.part_of(x)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((*x.shape[:-1], part.stop - part.start), x.dtype)
        return x[..., part]

    def part_of(self, x: Any) -> slice:
        """Return the fragment's part of the last dimension of one of its leaves."""
        size = x.shape[-1]
        return slice(self.number * size // self.count, (self.number + 1) * size // self.count)

    def put(self, tree: PyTree, leaves: Any) -> PyTree:
        """Return `tree` with the fragment's leaves replaced."""
        if self.places is None:
            return leaves
        all_leaves, treedef = jax.tree.flatten(tree)
        for place, leaf in zip(self.places, jax.tree.leaves(leaves), strict=True):
            whole = all_leaves[place]
            if self.count > 1:
                # XLA writes it into the donated buffer.
                start = self.part_of(whole).start
                leaf = jax.lax.dynamic_update_slice_in_dim(whole, leaf, start, whole.ndim - 1)
            all_leaves[place] = leaf
        return treedef.unflatten(all_leaves)


ALL_LEAVES = Fragment()


PARTS = ("anchor", "outer", "in_flight", "sent")
"""The fields of a state that fragments have one each of."""


def views(state: OuterState, count: int) -> list[OuterState]:
    """Return the state of each of `count` fragments, with the base's state in each."""
    if count == 1:
        return [state]
    fields = [getattr(state, name) or [()] * count for name in PARTS]
    return [state._replace(**dict(zip(PARTS, x, strict=True))) for x in zip(*fields, strict=True)]


def joined(state: OuterState, parts: Sequence[OuterState]) -> OuterState:
    """Return `state` with the anchors, outer states and values in flight of its fragments."""

    def of(name: str) -> Any:
        values = tuple(getattr(part, name) for part in parts)
        return values[0] if len(values) == 1 or values[0] == () else values

    return state._replace(**{name: of(name) for name in PARTS})


def division_of(
    fragments: Sequence[Fragment], *, has_flight: bool, sent: Sequence[str] | None
) -> dict[str, Any]:
    """Return how an outer state divides the parameters, as plain JSON.

    Returns:
      `fragments`: number, positions of leaves and number of parts of each leaf, for each fragment,
      None for the whole model; `in_flight`: whether the state has values in flight; with a codec
      `sent`: the fields of `js.spec.Sent` that it has.
    """
    places = [(x.number, x.places, x.count) for x in fragments]
    divided = [[number, list(p), count] for number, p, count in places if p is not None]
    coded = {} if sent is None else {"sent": list(sent)}
    return {"fragments": divided or None, "in_flight": has_flight, **coded}


def fragments_of(division: Mapping[str, Any]) -> tuple[Fragment, ...]:
    """Return the fragments of a state from what `division_of` returned.

    That of another algorithm has none of its names; the leaves tell then what is wrong.
    """
    divided = division.get("fragments") or [[0, None, 1]]
    return tuple(Fragment(n, None if p is None else tuple(p), count) for n, p, count in divided)


def exchange_of(fragment: Fragment, exchange: Exchange, params: PyTree) -> Exchange:
    """Return an exchange of all parameters as one of a fragment's leaves."""
    if fragment.places is None or exchange.param_specs is None:
        return exchange
    specs = specs_of_leaves(exchange.param_specs, params)
    return replace(exchange, param_specs=fragment.like(params, [specs[i] for i in fragment.places]))


def of_fragment(owner: str, fragment: Fragment, at: StatePlacement) -> StatePlacement:
    """Return a placement of all parameters as one of a fragment's leaves.

    Raises:
      ValueError: parameters in another form, of which a fragment's leaves tell too little.
    """
    if fragment.places is None:
        return at
    if at.form is not None:
        raise ValueError(
            f"{owner}: a state with several `fragments` can't be converted from parameters in "
            "another form (`js.checkpoint.SavedForm`): restore it in the form that was saved."
        )
    specs = None if at.specs is None else tuple(at.specs[i] for i in fragment.places)
    return replace(at, specs=specs)


@dataclass(frozen=True)
class Turn:
    """The events of one fragment, and the updates in which they are due.

    Attributes:
      number: number of the fragment, from 0.
      count: the number of fragments.
      schedule: the updates in which its slow step is due.
      delay: number of updates between taking what is sent and applying its mean.
    """

    number: int
    count: int
    schedule: Every
    delay: int

    def event(self, name: str) -> str:
        """Return the name of an event in phases: "slow", or "slow 1" of several fragments."""
        return name if self.count == 1 else f"{name} {self.number}"

    def takes(self, t: Any) -> Any:
        """Return whether update `t`, an int or an array, takes what is sent."""
        return self.schedule(t + self.delay)

    def sends(self, t: Any) -> Any:
        """Return whether update `t` sends a part; the last one goes with the slow step."""
        return self._within(t, self.delay)

    def parts_before(self, t: int) -> int:
        """Return how many parts of what is in flight were sent in the updates before `t`."""
        return self.delay - 1 - self._left(t) if self._within(t, self.delay) else 0

    def _left(self, t: Any) -> Any:
        """Return the number of updates from update `t` to the next slow step."""
        return (self.schedule.start + self.schedule.offset - t) % self.schedule.k

    def _within(self, t: Any, updates: int) -> Any:
        """Return whether a slow step is less than `updates` updates after update `t`."""
        left = self._left(t)
        return (left < updates) & (t + left > self.schedule.start)


@functools.cache  # every step on the host asks for phases several times
def turns_of(schedule: Every, count: int, delay: int) -> tuple[Turn, ...]:
    """Return the turns of `count` fragments, at equal distances in a period; the last ends it."""
    distance = schedule.k // count
    shifts = [(count - 1 - number) * distance for number in range(count - 1)]
    earlier = [replace(schedule, offset=schedule.offset - shift) for shift in shifts]
    return tuple(Turn(i, count, x, delay) for i, x in enumerate([*earlier, schedule]))


def check_turns(owner: str, schedule: Every, count: int, delay: int) -> None:
    """Check that fragments can take turns at equal distances, each after the exchange of the last.

    Raises:
      ValueError: the period is no multiple of the number, or the delay is as long as a turn.
    """
    if count > 1 and schedule.before == "all":
        raise ValueError(
            f'{owner}: `fragments` must be 1 for a schedule with before="all", since they take '
            f"turns at equal distances, got {count}."
        )
    if schedule.k % count:
        raise ValueError(
            f"{owner}: `sync_every` must be a multiple of `fragments`, so that they take turns at "
            f"equal distances, got sync_every={schedule.k} and {count} fragments."
        )
    if delay and delay >= schedule.k // count:
        raise ValueError(
            f"{owner}: `delay` must be less than sync_every / fragments, so that one fragment is "
            f"in flight at a time, got delay={delay}, sync_every={schedule.k} and "
            f"fragments={count}."
        )


def divided(owner: str, fragments: Fragments, params: PyTree) -> tuple[Fragment, ...]:
    """Return several fragments of these parameters, of which only shapes and dtypes matter.

    Stages of a pipeline are cut alike: each fragment has a part of every stage's buffers, so all
    devices send in each exchange, and as much as the others. Of other parameters a number divides
    the leaves, in their order, into runs whose largest has the fewest bytes. Cuts are between
    layers where there are enough of them: leaves of one layer have one parent.

    Raises:
      ValueError: more fragments than leaves or than elements of a stage's buffer, or a function
        whose values are not 0, 1, 2, ...
    """
    names = leaf_names(params)
    if not callable(fragments) and parts_of(params, Staged):
        return _cut_alike(owner, fragments, params)
    if callable(fragments):
        numbers = [fragments(name) for name in names]
        wanted = set(range(len(set(numbers))))
        if not numbers or any(type(n) is not int for n in numbers) or set(numbers) != wanted:
            shown = sorted(set(map(repr, numbers)))
            raise ValueError(
                f"{owner}: `fragments` must give every leaf a number, 0, 1, 2, ... without a gap, "
                f"got {', '.join(shown[:9])}."
            )
    else:
        numbers = _balanced(owner, fragments, params, names)
    if len(set(numbers)) == 1:
        return (ALL_LEAVES,)
    places: list[list[int]] = [[] for _ in set(numbers)]
    for place, number in enumerate(numbers):
        places[number].append(place)
    return tuple(Fragment(number, tuple(members)) for number, members in enumerate(places))


def _cut_alike(owner: str, count: int, params: PyTree) -> tuple[Fragment, ...]:
    """Return fragments that have a part of the last dimension of each leaf."""
    # The last dimension holds the leaves of a stage, and is never split over devices. A stage may
    # end before it does, so a part of it may be padding.
    leaves = jax.tree.leaves(params)
    least = min(x.shape[-1] if x.ndim else 0 for x in leaves)
    if count > least:
        raise ValueError(
            f"{owner}: `fragments` must not be more than the elements of a stage's buffer, got "
            f"{count} for {least} elements."
        )
    return tuple(Fragment(i, tuple(range(len(leaves))), count) for i in range(count))


def _balanced(owner: str, count: int, params: PyTree, names: Sequence[str]) -> list[int]:
    """Return the fragment of each leaf: `count` runs of leaves with even numbers of bytes."""
    sizes = [int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(params)]
    if count > len(sizes):
        raise ValueError(
            f"{owner}: `fragments` must not be more than the leaves of the parameters, got "
            f"{count} for {len(sizes)} leaves."
        )
    layers = [tuple(run) for _, run in itertools.groupby(range(len(names)), _layers(names))]
    if len(layers) < count:
        layers = [(place,) for place in range(len(names))]
    bytes_of_layers = [sum(sizes[place] for place in layer) for layer in layers]
    ends = _cuts(bytes_of_layers, count)
    numbers = np.repeat(np.arange(count), np.diff([0, *ends]))
    return [int(n) for n, layer in zip(numbers, layers, strict=True) for _ in layer]


def _layers(names: Sequence[str]) -> Callable[[int], str]:
    """Return a function from a leaf's position to the name of its layer.

    That is the path to the last number in a leaf's name, as layers are numbered, or its parent.
    """

    def layer(place: int) -> str:
        parts = names[place].split("/")
        numbered = [i for i, part in enumerate(parts) if any(c.isdigit() for c in part)]
        return "/".join(parts[: numbered[-1] + 1] if numbered else parts[:-1])

    return layer


def _cuts(sizes: Sequence[int], count: int) -> list[int]:
    """Return the ends of `count` runs of `sizes`, none empty, whose largest sum is smallest."""
    totals = [0, *itertools.accumulate(sizes)]
    # best[j]: largest sum of the best division of the first j sizes, and where its last run begins.
    best = [(float(total), 0) for total in totals]
    begins = []
    for parts in range(2, count + 1):
        row = [(float("inf"), 0)] * len(totals)
        for j in range(parts, len(totals)):
            row[j] = min((max(best[i][0], totals[j] - totals[i]), i) for i in range(parts - 1, j))
        begins.append([i for _, i in row])
        best = row
    ends = [len(sizes)]
    for row in reversed(begins):
        ends.append(row[ends[-1]])
    return ends[::-1]
