"""Slow steps whose exchange takes several updates, beside which training goes on.

`delay` updates pass between taking what replicas send and applying its mean. Each of them averages
one part, from values in the state alone, so a compiler can run the exchange beside forward and
backward pass.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, section 3.3.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._support.types import Phase, PyTree
from ...collectives import all_mean, mean_beside, mean_in_codec, quotient
from ...mesh import axis_names, uniform
from ...transform import Beside, Exchange, has_leaves, kept, packing_of
from ...tree import Buffer, at_least_float32
from ._fragments import SEND, SLOW, Turn, joined, views
from ._state import OuterState

NOTHING = -1  # `InFlight.parts` where nothing is in flight


class InFlight(NamedTuple):
    """The values of a fragment that are on their way to the other replicas."""

    values: PyTree  # like the fragment, at least float32: weighted parameters, partly averaged
    mass: jax.Array  # () float32, the weight of `values`
    rate: jax.Array  # () float32, the inner learning rate when they were taken; 1 without one
    parts: jax.Array  # () int32, number of averaged parts; -1 where nothing is in flight
    lost: PyTree = ()  # with error feedback: what of the averaged parts was not sent


def nothing_in_flight(values: PyTree, sent: PyTree) -> InFlight:
    """Return the first state for a fragment with these leaves, of which `sent` is remembered."""
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, at_least_float32(x.dtype)), values)
    one = jnp.ones([], jnp.float32)
    lost = jax.tree.map(jnp.zeros_like, sent.lost) if sent else ()
    return InFlight(zeros, one, jnp.ones_like(one), jnp.full([], NOTHING, jnp.int32), lost)


def unless_all_idle(
    anyone: jax.Array | None, displacement: PyTree, sent: PyTree, lost: PyTree
) -> tuple[PyTree, PyTree]:
    """Return D and what is remembered after an exchange of which this was lost, () if nothing is.

    Without weight on any replica D is 0, and what was not sent before stays; None: there is some.
    """
    after = sent._replace(lost=lost) if sent else ()
    if anyone is None:
        return displacement, after
    choose = functools.partial(jnp.where, anyone)
    return jax.tree.map(lambda x: choose(x, 0), displacement), jax.tree.map(choose, after, sent)


def average_part(flight: InFlight, exchange: Exchange, delay: int) -> InFlight:
    """Return what is in flight with its next part replaced by the mean over the replicas.

    Communication: that of `mean_beside`, over `exchange.axis_name`, of 1 / delay of each flat
      buffer of the fragment.
    """
    number = uniform(jnp.maximum(flight.parts, 0), axis_names(exchange.axis_name))
    flight = _with_mean(flight, number, exchange, delay)
    # More than all parts are in a state that `average_all` has completed.
    parts = jnp.where(flight.parts < 0, NOTHING, jnp.minimum(flight.parts + 1, delay))
    return flight._replace(parts=parts)


def _with_mean(flight: InFlight, number: jax.Array, exchange: Exchange, delay: int) -> InFlight:
    """Return what is in flight with part `number` replaced by the mean over the replicas.

    In place: what is in flight needs no second buffer, and parts that a run sends again, since it
    was restored on other replicas, keep their mean.
    """
    axes, local, codec = exchange.axis_name, exchange.local_axis_name, exchange.codec

    def averaged(buffer: Buffer, held: list[jax.Array], number: jax.Array) -> list[jax.Array]:
        del buffer
        size = -(-held[0].size // delay)
        start, padding = number * size, (0, delay * size - held[0].size)
        padded = [jnp.pad(x, padding) for x in held]
        part = lax.dynamic_slice(padded[0], (start,), (size,))
        if codec is None:
            new = [mean_beside(part, axes, local)]
        else:
            mean, lost = mean_in_codec(part, axes, codec, local)
            new = [mean, kept(codec, lost)][: len(held)]
        pairs = zip(padded, new, strict=True)
        return [lax.dynamic_update_slice(x, n, (start,))[: held[0].size] for x, n in pairs]

    packing = packing_of(flight.values, exchange)
    flats = [packing.pack(flight.values, role="slow")]
    if has_leaves(flight.lost):
        flats.append(packing.pack(flight.lost))
    found = packing.map(averaged, [list(held) for held in zip(*flats, strict=True)], number)
    values, *lost = [packing.unpack([x[i] for x in found]) for i in range(len(flats))]
    return flight._replace(values=values, lost=lost[0] if lost else flight.lost)


def average_all(flight: InFlight, *, exchange: Exchange, delay: int) -> InFlight:
    """Return what is in flight with all of its `delay` parts averaged, at once.

    Communication: that of `mean_beside`, over `exchange.axis_name`, of each flat buffer of the
      fragment.
    """
    # A host exchanges for replicas that are no larger than a device, so nothing is laid out.
    exchange = replace(exchange, param_specs=None)
    axes, local = exchange.axis_name, exchange.local_axis_name

    def averaged(buffer: Buffer, flat: jax.Array) -> jax.Array:
        del buffer
        return mean_beside(flat, axes, local)

    if exchange.codec is None:
        # Parts that are a mean already keep it.
        packing = packing_of(flight.values, exchange)
        flight = flight._replace(values=packing.through(averaged, flight.values, role="slow"))
    else:
        # One after the other, so that the codes are those of the parts; no mean is sent twice.
        for number in range(delay):
            after = _with_mean(flight, jnp.int32(number), exchange, delay)
            unless_sent = functools.partial(jnp.where, flight.parts > number)
            flight = jax.tree.map(unless_sent, flight, after)
    parts = jnp.where(flight.parts < 0, NOTHING, delay).astype(jnp.int32)
    return flight._replace(parts=parts)


def arrived(flight: InFlight, exchange: Exchange) -> tuple[PyTree, jax.Array]:
    """Return the mean of what was taken, and whether any replica had weight.

    Communication: one all-reduce of 4 bytes over `exchange.axis_name`.
    """
    total = all_mean(flight.mass, exchange.axis_name)
    return jax.tree.map(lambda x: quotient(x, total), flight.values), total > 0


def dropped(flight: InFlight, when: Any) -> InFlight:
    """Return what is in flight, or where `when` nothing."""
    parts = jnp.where(when, NOTHING, flight.parts).astype(jnp.int32)
    return flight._replace(parts=parts)


def beside_updates(turns: Callable[[], Sequence[Turn]], exchange: Exchange, delay: int) -> Beside:
    """Return the exchange of a fragment as a program of its own, beside the updates of its delay.

    Args:
      turns: function that returns the turn of each fragment, once their number is known.
      exchange: the axes and the form of the exchange.
      delay: number of updates between taking what is sent and applying its mean.
    """

    def sender(phase: Phase) -> int:
        return next(i for i, turn in enumerate(turns()) if turn.event(SEND) in phase)

    def put(state: OuterState, phase: Phase, flight: InFlight) -> OuterState:
        number, after = sender(phase), views(state, len(turns()))
        after[number] = after[number]._replace(in_flight=flight)
        return joined(state, after)

    def is_behind(state: OuterState, t: int) -> bool:
        # -1 stands for nothing in flight: the base refused it, and none is expected.
        sent = [int(part.in_flight.parts) for part in views(state, len(turns()))]
        due = [turn.parts_before(t) for turn in turns()]
        return any(0 <= x < y for x, y in zip(sent, due, strict=True))

    return Beside(
        without=lambda phase: tuple(
            event for event in phase if event not in [x.event(SEND) for x in turns()]
        ),
        sent=lambda state, phase: views(state, len(turns()))[sender(phase)].in_flight,
        exchange=functools.partial(average_all, exchange=exchange, delay=delay),
        put=put,
        ends=lambda phase: turns()[sender(phase)].event(SLOW) in phase,
        is_behind=is_behind,
    )
