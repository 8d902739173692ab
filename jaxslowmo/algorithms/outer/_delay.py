"""Slow steps whose exchange takes several updates, beside which training goes on.

`delay` updates pass between taking what replicas send and applying its mean. Each of them averages
one part, from values in the state alone, so a compiler can run the exchange beside forward and
backward pass.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, section 3.3.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ..._support.types import PyTree
from ...collectives import async_mean, mean_in_codec, quotient
from ...mesh import uniform
from ...transform import OverlappedExchange, ReplicaGroup, packing_of
from ...tree import Buffer, at_least_float32
from .._error_feedback import has_leaves, next_residual
from ._fragments import SEND, SLOW, FragmentSchedule

NOTHING = -1  # `InFlight.parts` where nothing is in flight


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

    of_values = replicas.layouts(flight.values)
    specs = None
    if of_values is not None:
        of_residual = of_values if has_leaves(flight.residual) else ()
        others = len(jax.tree.leaves(flight)) - len(of_values) - len(of_residual)
        specs = [*of_values, *[P()] * others, *of_residual]
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
    found = packing.map(average_slice, [list(held) for held in zip(*flats, strict=True)])
    values, *lost = [packing.unpack([x[i] for x in found]) for i in range(len(flats))]
    return flight._replace(values=values, residual=lost[0] if lost else flight.residual)


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


def with_flight(flights: Sequence[InFlight], number: int, flight: InFlight) -> tuple[InFlight, ...]:
    """Return what is in flight of all fragments with that of one replaced."""
    return (*flights[:number], flight, *flights[number + 1 :])


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
    of_event = {schedule.event(SEND): schedule for schedule in schedules}

    def number(event: str) -> int:
        return of_event[event].number

    def with_values(local: PyTree, event: str, flight: InFlight) -> PyTree:
        return local | {"in_flight": with_flight(local["in_flight"], number(event), flight)}

    def is_behind(local: PyTree, event: str, t: int) -> bool:
        # -1 stands for nothing in flight: the base refused it, and none is expected.
        sent = int(local["in_flight"][number(event)].parts)
        return 0 <= sent < of_event[event].parts_before(t)

    return OverlappedExchange(
        sending_events=lambda phase: tuple(event for event in phase if event in of_event),
        values_to_send=lambda local, event: local["in_flight"][number(event)],
        exchange=functools.partial(average_all, replicas=replicas, delay=delay),
        with_values=with_values,
        is_applied=lambda phase, event: of_event[event].event(SLOW) in phase,
        is_behind=is_behind,
    )
