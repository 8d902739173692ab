"""Parts of a model with slow steps at different times, whose exchange may last several updates.

`delay` updates pass between taking what replicas send and applying its mean. Each of them averages
one part, from values in the state alone, so a compiler can run the exchange beside forward and
backward pass.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, section 3.3.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from ..._support.checks import ArgumentError, checked_int, checks_flags
from ..._support.types import PyTree
from ...collectives import async_mean, mean_in_codec, quotient
from ...mesh import uniform
from ...transform import Every, OverlappedExchange, ReplicaGroup, packing_of
from ...tree import Buffer, Staged, at_least_float32, form_matcher, leaf_names, parts_of
from .._error_feedback import has_leaves, next_residual

TAKE, SEND, SLOW = "take", "send", "slow"  # the first two with a delay
NOTHING = -1  # `InFlight.parts` where nothing is in flight


@dataclass(frozen=True)
class Layers:
    """Fragments that cut stacked layers along an axis; made by `js.layers`.

    Attributes:
      count: the number of fragments.
      where: function from the name of a leaf to whether it holds stacked layers.
      axis: the axis of the layers.
      interleaved: whether a fragment has every (count - 1)-th layer, or layers that follow.
    """

    count: int
    where: Callable[[str], bool]
    axis: int = 1
    interleaved: bool = True


@checks_flags("layers")
def layers(
    count: int, *, where: Callable[[str], bool], axis: int = 1, interleaved: bool = True
) -> Layers:
    """Return `fragments` for a model whose layers are stacked in its leaves, as scanned ones are.

    Fragment 0 is all leaves without stacked layers; fragments 1 to count - 1 have equal numbers of
    layers, slices of the stacked leaves. Anchors are never sharded along that axis.

    Args:
      count: the number of fragments, at least 2; count - 1 divides the number of layers.
      where: function from the name of a leaf, such as "decoder/layers/mlp/kernel", to whether it
        holds stacked layers.
      axis: the axis of the layers in these leaves.
      interleaved: True gives fragment i the layers i - 1, i - 1 + (count - 1), ...; False gives it
        layers that follow each other.

    Returns:
      The argument `fragments` of `js.slowmo`, `js.diloco` and `js.local_sgd`.

    Raises:
      ValueError: a count below 2, an axis below 0, or `where` that is no function.

    Communication: none.

    Source: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025; MaxText's
      fragments are these.
    """
    checked_int("layers: `count` is a number of fragments and", count, 2)
    checked_int("layers: `axis`", axis, 0)
    if not callable(where):
        raise ValueError(
            f"layers: `where` must be a function from a leaf's name to a bool, got {where!r}."
        )
    return Layers(count, where, axis, interleaved)


Fragments = int | Callable[[str], int] | Layers
"""The number of fragments, a function from a leaf's name to that of its fragment, or layers."""


@dataclass(frozen=True)
class Part:
    """Part `index` of `count` equal ones of a dimension of an array."""

    axis: int
    index: int
    count: int
    interleaved: bool = False

    def read(self, x: Any) -> Any:
        """Return this part of an array."""
        return x[self._place(x)]

    def write(self, x: Any, part: Any) -> Any:
        """Return the array with this part replaced."""
        if self.interleaved:
            return x.at[self._place(x)].set(part)
        # XLA writes it into the donated buffer.
        start = self._place(x)[self.axis % x.ndim].start
        return jax.lax.dynamic_update_slice_in_dim(x, part, start, self.axis % x.ndim)

    def _place(self, x: Any) -> tuple[slice, ...]:
        axis, size = self.axis % x.ndim, x.shape[self.axis]
        part = slice(self.index * size // self.count, (self.index + 1) * size // self.count)
        if self.interleaved:
            part = slice(self.index, None, self.count)
        return (*[slice(None)] * axis, part, *[slice(None)] * (x.ndim - axis - 1))


@dataclass(frozen=True)
class Fragment:
    """The leaves of one fragment.

    Attributes:
      number: number of the fragment, from 0.
      places: positions of its leaves among those of the parameters; None: all leaves.
      part: the part that it has of each of these leaves; None: it has whole leaves.
    """

    number: int = 0
    places: tuple[int, ...] | None = None
    part: Part | None = None

    def select(self, tree: PyTree) -> Any:
        """Return the fragment's leaves of a tree.

        The result has the structure of `tree`, with `optax.MaskedNode()` in the place of leaves of
        other fragments, so that an optimizer sees the names of the leaves. Of buffers of stages,
        whose names say nothing, it is a list.
        """
        if self.places is None:
            return tree
        leaves, part = jax.tree.leaves(tree), self.part
        return self.unflatten(
            tree, [leaves[i] if part is None else part.read(leaves[i]) for i in self.places]
        )

    def unflatten(self, tree: PyTree, leaves: list[Any]) -> Any:
        """Return these values, one for each leaf of the fragment, in the form of `select(tree)`."""
        if self.places is None or parts_of(tree, Staged):
            return leaves
        structure = jax.tree.structure(tree)
        nodes: list[Any] = [optax.MaskedNode()] * structure.num_leaves
        for place, leaf in zip(self.places, leaves, strict=True):
            nodes[place] = leaf
        return structure.unflatten(nodes)

    def write(self, tree: PyTree, leaves: Any) -> PyTree:
        """Return `tree` with the fragment's leaves replaced."""
        if self.places is None:
            return leaves
        all_leaves, treedef = jax.tree.flatten(tree)
        for place, leaf in zip(self.places, jax.tree.leaves(leaves), strict=True):
            part = self.part
            all_leaves[place] = leaf if part is None else part.write(all_leaves[place], leaf)
        return treedef.unflatten(all_leaves)


ALL_LEAVES = Fragment()


class FragmentStates(NamedTuple):
    """The states of an optimizer that steps each fragment by itself."""

    # The trees like the anchor, of all fragments together; () if fragments differ in their number.
    moments: tuple[PyTree, ...]
    rest: tuple[Any, ...]  # for each fragment the other leaves, such as its count; or its state


def combine_states(
    states: Sequence[PyTree], fragments: Sequence[Fragment], anchor: PyTree
) -> PyTree:
    """Return the states of all fragments as one; the state itself of a single fragment."""
    if len(fragments) == 1:
        return states[0]
    split = [_split_state(x, f.select(anchor)) for x, f in zip(states, fragments, strict=True)]
    counts = {len(like) for like, _ in split}
    if 0 in counts or len(counts) > 1:
        # The optimizer tells leaves apart: no tree of moments goes through all fragments.
        return FragmentStates((), tuple(states))
    moments: list[PyTree] = []
    rest = []
    for fragment, (like, others) in zip(fragments, split, strict=True):
        if not moments:  # they may have another dtype than the anchor
            dtypes = [jax.tree.leaves(tree)[0].dtype for tree in like]
            moments = [
                jax.tree.map(lambda a, to=to: jnp.zeros_like(a, to), anchor) for to in dtypes
            ]
        moments = [fragment.write(m, x) for m, x in zip(moments, like, strict=True)]
        rest.append(tuple(others))
    return FragmentStates(tuple(moments), tuple(rest))


def with_state(states: PyTree, fragment: Fragment, state: PyTree, anchor: PyTree) -> PyTree:
    """Return the states of all fragments with that of one replaced."""
    if fragment.places is None:
        return state
    moments, rest = (), [*states.rest]
    rest[fragment.number] = state
    if states.moments:
        like, others = _split_state(state, fragment.select(anchor))
        moments = tuple(fragment.write(m, x) for m, x in zip(states.moments, like, strict=True))
        rest[fragment.number] = tuple(others)
    return FragmentStates(moments, tuple(rest))


def fragment_state(
    states: PyTree, fragment: Fragment, init: Callable[[PyTree], PyTree], anchor: PyTree
) -> PyTree:
    """Return the state of one fragment, of the structure that `init` makes."""
    if fragment.places is None:
        return states
    if not states.moments:
        return states.rest[fragment.number]
    part = fragment.select(anchor)
    template = jax.eval_shape(init, part)
    is_alike = form_matcher(part)
    leaves, treedef = jax.tree.flatten(template, is_leaf=is_alike)
    moments = iter([fragment.select(m) for m in states.moments])
    rest = iter(states.rest[fragment.number])
    return treedef.unflatten([next(moments if is_alike(x) else rest) for x in leaves])


def _split_state(state: PyTree, like: PyTree) -> tuple[list[PyTree], list[Any]]:
    """Return the trees in `state` that are like `like`, and the other leaves."""
    is_alike = form_matcher(like)
    leaves = jax.tree.leaves(state, is_leaf=is_alike)
    return [x for x in leaves if is_alike(x)], [x for x in leaves if not is_alike(x)]


@dataclass(frozen=True)
class FragmentSchedule:
    """The events of one fragment, and the updates in which they are due.

    Attributes:
      number: number of the fragment, from 0.
      count: the number of fragments.
      every: the updates in which its slow step is due.
      delay: number of updates between taking what is sent and applying its mean.
    """

    number: int
    count: int
    every: Every
    delay: int

    def event(self, name: str) -> str:
        """Return the name of an event in phases: "slow", or "slow 1" of several fragments."""
        return name if self.count == 1 else f"{name} {self.number}"

    def takes(self, t: Any) -> Any:
        """Return whether update `t`, an int or an array, takes what is sent."""
        return self.every(t + self.delay)

    def sends(self, t: Any) -> Any:
        """Return whether update `t` sends a part; the last one goes with the slow step."""
        return self._is_within(t, self.delay)

    def parts_before(self, t: int) -> int:
        """Return how many parts of what is in flight were sent in the updates before `t`."""
        return self.delay - 1 - self._updates_left(t) if self._is_within(t, self.delay) else 0

    def _updates_left(self, t: Any) -> Any:
        """Return the number of updates from update `t` to the next slow step."""
        return (self.every.start + self.every.offset - t) % self.every.k

    def _is_within(self, t: Any, updates: int) -> Any:
        """Return whether a slow step is less than `updates` updates after update `t`."""
        left = self._updates_left(t)
        return (left < updates) & (t + left > self.every.start)


@functools.cache  # every step on the host asks for phases several times
def fragment_schedules(schedule: Every, count: int, delay: int) -> tuple[FragmentSchedule, ...]:
    """Return the schedules of `count` fragments, evenly over a period, which the last one ends."""
    distance = schedule.k // count
    shifts = [(count - 1 - number) * distance for number in range(count - 1)]
    earlier = [replace(schedule, offset=schedule.offset - shift) for shift in shifts]
    return tuple(FragmentSchedule(i, count, x, delay) for i, x in enumerate([*earlier, schedule]))


def check_fragment_schedules(owner: str, schedule: Every, count: int, delay: int) -> None:
    """Check that fragments can take turns at equal distances, each before its own next one.

    Raises:
      ValueError: the period is no multiple of the number, or the delay is as long as the period.
    """
    if count > 1 and schedule.before == "all":
        raise ArgumentError(
            "fragments",
            f'{owner}: `fragments` must be 1 for a schedule with before="all", since they take '
            f"turns at equal distances, got {count}.",
        )
    if schedule.k % count:
        raise ArgumentError(
            "sync_every",
            f"{owner}: `sync_every` must be a multiple of `fragments`, so that they take turns at "
            f"equal distances, got sync_every={schedule.k} and {count} fragments.",
        )
    if delay and delay >= schedule.k:
        raise ArgumentError(
            "delay",
            f"{owner}: `delay` must be less than `sync_every`, so that a fragment has arrived "
            f"before it is sent again, got delay={delay} and sync_every={schedule.k}.",
        )


def make_fragments(owner: str, fragments: Fragments, params: PyTree) -> tuple[Fragment, ...]:
    """Return the fragments of these parameters, of which only shapes and dtypes matter.

    Stages of a pipeline are cut alike: each fragment has a part of every stage's buffers, so all
    devices send in each exchange, and as much as the others. Of other parameters a number divides
    the leaves, in their order, into runs whose largest has the fewest bytes. Cuts are between
    layers where there are enough of them: leaves of one layer have one parent.

    Raises:
      ValueError: more fragments than leaves or than elements of a stage's buffer, a function whose
        values are not 0, 1, 2, ..., or layers that count - 1 does not divide.
    """
    if fragments == 1:
        return (ALL_LEAVES,)
    names = leaf_names(params)
    if isinstance(fragments, Layers):
        return _layer_fragments(owner, fragments, params, names)
    if not callable(fragments) and parts_of(params, Staged):
        return _stage_fragments(owner, fragments, params)
    if callable(fragments):
        numbers = [fragments(name) for name in names]
        wanted = set(range(len(set(numbers))))
        if not numbers or any(type(n) is not int for n in numbers) or set(numbers) != wanted:
            shown = sorted(set(map(repr, numbers)))
            raise ArgumentError(
                "fragments",
                f"{owner}: `fragments` must give every leaf a number, 0, 1, 2, ... without a gap, "
                f"got {', '.join(shown[:9])}.",
            )
    else:
        numbers = _even_fragments(owner, fragments, params, names)
    if len(set(numbers)) == 1:
        return (ALL_LEAVES,)
    places: list[list[int]] = [[] for _ in set(numbers)]
    for place, number in enumerate(numbers):
        places[number].append(place)
    return tuple(Fragment(number, tuple(members)) for number, members in enumerate(places))


def _layer_fragments(
    owner: str, fragments: Layers, params: PyTree, names: Sequence[str]
) -> tuple[Fragment, ...]:
    """Return fragment 0, the leaves without stacked layers, and those of layers."""
    parts, axis = fragments.count - 1, fragments.axis
    stacked = [i for i, name in enumerate(names) if fragments.where(name)]
    others = tuple(i for i in range(len(names)) if i not in stacked)
    leaves = jax.tree.leaves(params)
    wrong = [
        f"{names[i]} {list(leaves[i].shape)}"
        for i in stacked
        if leaves[i].ndim <= axis or leaves[i].shape[axis] % parts
    ]
    if not stacked or not others or wrong:
        rule = f"got {', '.join(wrong)}" if wrong else f"{len(stacked)} of {len(names)} leaves are"
        raise ArgumentError(
            "fragments",
            f"{owner}: `fragments` of js.layers needs leaves with layers along axis {axis}, whose "
            f"number count - 1 = {parts} divides, and others; {rule}.",
        )
    cut = [Part(axis, i, parts, fragments.interleaved) for i in range(parts)]
    return (
        Fragment(0, others),
        *(Fragment(i, tuple(stacked), part) for i, part in enumerate(cut, start=1)),
    )


def _stage_fragments(owner: str, count: int, params: PyTree) -> tuple[Fragment, ...]:
    """Return fragments that have a part of the last dimension of each leaf."""
    # The last dimension holds the leaves of a stage, and is never split over devices. A stage may
    # end before it does, so a part of it may be padding.
    leaves = jax.tree.leaves(params)
    least = min(x.shape[-1] if x.ndim else 0 for x in leaves)
    if count > least:
        raise ArgumentError(
            "fragments",
            f"{owner}: `fragments` must not be more than the elements of a stage's buffer, got "
            f"{count} for {least} elements.",
        )
    places = tuple(range(len(leaves)))
    return tuple(Fragment(i, places, Part(-1, i, count)) for i in range(count))


def _even_fragments(owner: str, count: int, params: PyTree, names: Sequence[str]) -> list[int]:
    """Return the fragment of each leaf: `count` runs of leaves with even numbers of bytes."""
    sizes = [int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(params)]
    if count > len(sizes):
        raise ArgumentError(
            "fragments",
            f"{owner}: `fragments` must not be more than the leaves of the parameters, got "
            f"{count} for {len(sizes)} leaves.",
        )
    layers = [_layer_name(name) for name in names]
    runs = [tuple(run) for _, run in itertools.groupby(range(len(names)), layers.__getitem__)]
    if len(runs) < count:
        runs = [(place,) for place in range(len(names))]
    ends = _run_ends([sum(sizes[place] for place in run) for run in runs], count)
    numbers = np.repeat(np.arange(count), np.diff([0, *ends]))
    return [int(n) for n, run in zip(numbers, runs, strict=True) for _ in run]


def _layer_name(leaf_name: str) -> str:
    """Return the name of a leaf's layer.

    That is the path to the last number in the leaf's name, as layers are numbered, or its parent.
    """
    parts = leaf_name.split("/")
    numbered = [i for i, part in enumerate(parts) if any(c.isdigit() for c in part)]
    return "/".join(parts[: numbered[-1] + 1] if numbered else parts[:-1])


def _run_ends(sizes: Sequence[int], count: int) -> list[int]:
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


class InFlight(NamedTuple):
    """The values of a fragment that are on their way to the other replicas."""

    values: PyTree  # like the fragment, at least float32: weighted parameters, partly averaged
    mass: jax.Array  # () float32, the weight of `values`
    rate: jax.Array  # () float32, the inner learning rate when they were taken; 1 without one
    parts: jax.Array  # () int32, number of averaged parts; -1 where nothing is in flight
    residual: PyTree = ()  # with error feedback: what of the averaged parts was not sent

    def drop(self, when: Any = True) -> "InFlight":
        """Return what is in flight, or where `when` nothing."""
        return self._replace(parts=jnp.where(when, NOTHING, self.parts).astype(jnp.int32))


def nothing_in_flight(values: PyTree, residual: PyTree) -> InFlight:
    """Return the first state for a fragment with these leaves."""
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, at_least_float32(x.dtype)), values)
    one = jnp.ones([], jnp.float32)
    lost = jax.tree.map(jnp.zeros_like, residual)
    return InFlight(zeros, one, jnp.ones_like(one), jnp.full([], NOTHING, jnp.int32), lost)


def average_part(flight: InFlight, replicas: ReplicaGroup, delay: int) -> InFlight:
    """Return what is in flight of a fragment with its next part replaced by its mean.

    Communication: that of `async_mean` of 1 / delay of each flat buffer of the fragment.
    """

    def run(group: ReplicaGroup, flight: InFlight) -> list[InFlight]:
        number = uniform(jnp.maximum(flight.parts, 0), group.axes)
        return [_with_mean(flight, number, group, delay)]

    value_specs = replicas.layouts(flight.values)
    specs = None
    if value_specs is not None:
        residual_specs = value_specs if has_leaves(flight.residual) else ()
        num_others = len(jax.tree.leaves(flight)) - len(value_specs) - len(residual_specs)
        specs = [*value_specs, *[P()] * num_others, *residual_specs]
    held = replicas.local(flight, specs)
    flight = replicas.run(run, [held], held, packs=True)[0]
    # More than all parts are in a state that `average_all` has completed.
    parts = jnp.where(flight.parts < 0, NOTHING, jnp.minimum(flight.parts + 1, delay))
    return flight._replace(parts=parts)


def _with_mean(flight: InFlight, number: jax.Array, replicas: ReplicaGroup, delay: int) -> InFlight:
    """Return what is in flight with part `number` replaced by the mean over the replicas.

    In place: what is in flight needs no second buffer, and parts that a run sends again, since it
    was restored on other replicas, keep their mean.
    """
    axes, local, codec = replicas.axis_name, replicas.local_axis_name, replicas.codec

    def average_slice(buffer: Buffer, held: list[jax.Array]) -> list[jax.Array]:
        del buffer
        size = -(-held[0].size // delay)
        start, padding = number * size, (0, delay * size - held[0].size)
        padded = [jnp.pad(x, padding) for x in held]
        part = lax.dynamic_slice(padded[0], (start,), (size,))
        if codec is None:
            new = [async_mean(part, axes, local)]
        else:
            mean, lost = mean_in_codec(part, axes, codec, local)
            new = [mean, next_residual(codec, lost)][: len(held)]
        pairs = zip(padded, new, strict=True)
        return [lax.dynamic_update_slice(x, n, (start,))[: held[0].size] for x, n in pairs]

    packing = packing_of(flight.values, replicas)
    flats = [packing.pack(flight.values, role="slow")]
    if has_leaves(flight.residual):
        flats.append(packing.pack(flight.residual))
    averaged = packing.map(average_slice, [list(held) for held in zip(*flats, strict=True)])
    values, *residual = [packing.unpack([x[i] for x in averaged]) for i in range(len(flats))]
    return flight._replace(values=values, residual=residual[0] if residual else flight.residual)


def average_all(flight: InFlight, *, replicas: ReplicaGroup, delay: int) -> InFlight:
    """Return what is in flight of a fragment with all of its `delay` parts averaged, at once.

    Communication: that of `async_mean`, of each flat buffer of the fragment.
    """
    axes, local = replicas.axis_name, replicas.local_axis_name

    def average_buffer(buffer: Buffer, flat: jax.Array) -> jax.Array:
        del buffer
        return async_mean(flat, axes, local)

    if replicas.codec is None:
        # Parts that are a mean already keep it.
        packing = packing_of(flight.values, replicas)
        flight = flight._replace(
            values=packing.map_buffers(average_buffer, flight.values, role="slow")
        )
    else:
        # One after the other, so that the codes are those of the parts; no mean is sent twice.
        for number in range(delay):
            after = _with_mean(flight, jnp.int32(number), replicas, delay)
            unless_sent = functools.partial(jnp.where, flight.parts > number)
            flight = jax.tree.map(unless_sent, flight, after)
    parts = jnp.where(flight.parts < 0, NOTHING, delay).astype(jnp.int32)
    return flight._replace(parts=parts)


def with_flight(local: dict[str, Any], number: int, flight: InFlight) -> dict[str, Any]:
    """Return the local state with this in flight of one fragment."""
    flights = local["in_flight"]
    return local | {"in_flight": (*flights[:number], flight, *flights[number + 1 :])}


def arrived_mean(flight: InFlight, replicas: ReplicaGroup) -> tuple[PyTree, jax.Array]:
    """Return the mean of what was taken, and whether any replica had weight.

    Communication: one all-reduce of 4 bytes.
    """
    total = replicas.plain.mean_number(flight.mass)
    return jax.tree.map(lambda x: quotient(x, total), flight.values), total > 0


def overlapped_exchange(
    schedules: Sequence[FragmentSchedule], replicas: ReplicaGroup, delay: int
) -> OverlappedExchange:
    """Return the exchange of a fragment as a program of its own, beside the updates of its delay.

    Args:
      schedules: the schedule of each fragment.
      replicas: the replicas, whose devices hold whole leaves.
      delay: number of updates between taking what is sent and applying its mean.
    """
    schedule_by_event = {schedule.event(SEND): schedule for schedule in schedules}

    def number(event: str) -> int:
        return schedule_by_event[event].number

    def is_behind(local: PyTree, event: str, t: int) -> bool:
        # -1 stands for nothing in flight: the base refused it, and none is expected.
        sent = int(local["in_flight"][number(event)].parts)
        return 0 <= sent < schedule_by_event[event].parts_before(t)

    return OverlappedExchange(
        sending_events=lambda phase: tuple(event for event in phase if event in schedule_by_event),
        values_to_send=lambda local, event: local["in_flight"][number(event)],
        exchange=functools.partial(average_all, replicas=replicas, delay=delay),
        with_values=lambda local, event, flight: with_flight(local, number(event), flight),
        is_applied=lambda phase, event: schedule_by_event[event].event(SLOW) in phase,
        is_behind=is_behind,
    )
