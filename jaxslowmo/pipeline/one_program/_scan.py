"""The program of one device: a scan over the ticks of a schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ..._support.types import PyTree
from ...mesh import vary_over
from ...tree import at_least_float32
from ..model import LossTerms, WithState
from ..plan import StageKind, Totals, microbatch_of
from ._rings import (
    Activations,
    Buffers,
    Ring,
    Values,
    Writing,
    nothing,
    received,
    row_of,
    writing_to,
)
from ._table import KINDS, Channel, Half, TickTable

Branch = Callable[..., Any]


@dataclass(frozen=True)
class Device:
    """What a device computes with in one step.

    Attributes:
      buffers: parameters of its stage, by name (*sizes, elements).
      states: model state of its layers, by name (elements,).
      layouts: by name how those lie over axes that the compiler handles; None: whole.
      batch: leaves (microbatches, examples, ...), and `Shared` ones.
      rng: the key of the step, or None.
      shifts: per stage of the model, how far its layers are from those of the stage that stands
        for its kind.
      axes: those over which values vary.
      axis_name: of the stages.
    """

    buffers: dict[str, jax.Array]
    states: dict[str, jax.Array]
    layouts: Mapping[str, P | None]
    batch: PyTree
    rng: Any
    shifts: np.ndarray
    axes: tuple[str, ...]
    axis_name: str

    def microbatch(self, now: Half) -> PyTree:
        """Return the microbatch that an operation computes."""
        shift = jnp.asarray(self.shifts)[now.model_stage]
        return microbatch_of(self.batch, self.rng, now.microbatch, shift)

    def varied(self) -> "Device":
        """With all that it has typed alike."""
        rng = None if self.rng is None else self.vary(self.rng)
        own = self.vary((self.buffers, self.states, self.batch))
        return replace(self, buffers=own[0], states=own[1], batch=own[2], rng=rng)

    def vary(self, tree: PyTree) -> PyTree:
        """`tree` typed as all values here are: branches must agree."""
        return vary_over(tree, self.axes)

    def sent(self, leaves: Sequence[jax.Array], channel: Channel) -> list[jax.Array]:
        """What arrives here over a channel.

        Communication: one collective-permute per array; none if all stages send to themselves.
        """
        if all(at == to for at, to in channel):
            return list(leaves)
        return [lax.ppermute(x, self.axis_name, channel) for x in leaves]

    def own_column(self, table: np.ndarray) -> jax.Array:
        """This device stage's column of a table (ticks, stages)."""
        here = lax.axis_index(self.axis_name)
        return lax.dynamic_index_in_dim(jnp.asarray(table), here, 1, keepdims=False)

    def zero_gradient(self, name: str) -> jax.Array | None:
        """Zeros to add gradients of a buffer to, at least float32; None for integers."""
        buffer, layout = self.buffers[name], self.layouts[name]
        if not jnp.issubdtype(buffer.dtype, jnp.inexact):
            return None
        zeros = jnp.zeros(buffer.shape, at_least_float32(buffer.dtype))
        return zeros if layout is None else lax.with_sharding_constraint(zeros, layout)


class Carry(NamedTuple):
    """What lies on a device between two ticks.

    Attributes:
      activations: those that have arrived and wait for their F.
      cotangents: those that wait for their B.
      sent: cotangents that the tick before has made.
      stash: what F has left.
      kept: what B has left for W.
      totals: so far.
    """

    activations: Buffers
    cotangents: Buffers
    sent: list[jax.Array]
    stash: Buffers
    kept: Buffers
    totals: Totals


@dataclass(frozen=True)
class Scan:
    """A schedule's program, given what its stages compute.

    Attributes:
      table: of the schedule.
      kinds: of stages.
      of_stage: per stage of the model its kind.
      programs: per kind its operations; None for forward passes alone.
      activations: what travels.
      loss: types of what the last stage gives.
      seed: cotangent of the loss of a microbatch.
      in_branches: whether branches write into the buffers; see `InBranches`.
    """

    table: TickTable
    kinds: Sequence[StageKind]
    of_stage: np.ndarray
    programs: Sequence[Any] | None
    activations: Activations
    loss: LossTerms
    seed: float
    in_branches: bool

    def run(self, device: Device) -> Totals:
        """Sums over microbatches of loss and gradients, of the stages that this device holds.

        Communication: per tick one collective-permute of an activation for each channel of the
          schedule, and one of its cotangent, over the stages.
        """
        forward = _Forward(self, device)
        backward = None if self.programs is None else _Backward(self, device)

        def tick(carry: Carry, now: Any) -> tuple[Carry, None]:
            (f_branch, f), (b_branch, b) = now
            if backward is not None:
                carry = self._receive_cotangents(device, carry, b)
            with jax.named_scope("F"):
                carry, y = forward.step(carry, f_branch, f)
            if backward is not None:
                with jax.named_scope("B"):
                    carry = backward.step(carry, b_branch, b)
            return self._receive_activations(device, carry, y, f), None

        halves = [(forward.numbers, self.table.forward)]
        halves.append((_no_numbers(self.table.backward), self.table.backward))
        if backward is not None:
            halves[1] = backward.numbers, self.table.backward
        own = jax.tree.map(device.own_column, halves)
        start = device.vary(self._start(device))
        return lax.scan(tick, start, own)[0].totals

    @property
    def stash(self) -> Ring:
        """Rows of what F leaves."""
        return Ring([p.stash for p in self.programs or ()], self._rows(self.table.stash))

    @property
    def kept(self) -> Ring:
        """Rows of what B leaves for W."""
        rows = self._rows(self.table.kept)
        kept = [p.kept if n else () for p, n in zip(self.programs or (), rows, strict=False)]
        return Ring(kept, rows)

    def writing(self, ring: Ring, leaving: Sequence[int | None]) -> Writing:
        """How branches, per branch the kind of stage that leaves something, write into buffers."""
        return writing_to(ring, [None, *leaving], in_branches=self.in_branches)

    def _rows(self, of_model_stages: Sequence[int]) -> list[int]:
        """The most rows that a stage of each kind needs."""
        of_kinds = [0] * len(self.programs or ())
        for i, count in zip(self.of_stage, of_model_stages, strict=True) if of_kinds else ():
            of_kinds[i] = max(of_kinds[i], count)
        return of_kinds

    def branches(self, half: Half, kinds: Sequence[str], make: Callable[[str, int], Branch]) -> Any:
        """The branches of half a tick, without that of doing nothing, and their numbers.

        Returns:
          Branches that some device runs, with the operation and the kind of stage of each; and per
          tick and device the number of its branch: 0 for doing nothing, else 1 and up.
        """
        numbers = np.zeros_like(half.kind)
        found: list[Branch] = []
        what: list[tuple[str, int]] = []
        for kind in kinds:
            runs = half.kind == KINDS.index(kind)
            for i in np.unique(self.of_stage[half.model_stage[runs]]):
                found.append(make(kind, int(i)))
                what.append((kind, int(i)))
                numbers[runs & (self.of_stage[half.model_stage] == i)] = len(found)
        return found, what, numbers

    def _start(self, device: Device) -> Carry:
        of_x, of_dy = self.table.arrivals
        grads: dict[str, jax.Array | None] = dict.fromkeys(device.buffers)
        if self.programs is not None:
            grads = {name: device.zero_gradient(name) for name in device.buffers}
        return Carry(
            activations=Ring([self.activations.types], [of_x]).start(),
            cotangents=Ring([self.activations.cotangents], [of_dy]).start(),
            sent=nothing(self.activations.cotangents),
            stash=self.stash.start(),
            kept=self.kept.start(),
            totals=Totals(
                jax.tree.map(lambda x: jnp.zeros((), at_least_float32(x.dtype)), self.loss),
                grads,
                device.states,
            ),
        )

    def _receive_cotangents(self, device: Device, carry: Carry, b: Half) -> Carry:
        back = [tuple((to, at) for at, to in channel) for channel in self.table.channels]
        buffers = _receive(device, carry.cotangents, carry.sent, b, back)
        return carry._replace(cotangents=buffers)

    def _receive_activations(self, device: Device, carry: Carry, y: Values, f: Half) -> Carry:
        buffers = _receive(device, carry.activations, y, f, self.table.channels)
        return carry._replace(activations=buffers)


def _receive(
    device: Device, buffers: Buffers, sent: Values, now: Half, channels: Sequence[Channel]
) -> Buffers:
    for channel, row in zip(channels, now.arrivals, strict=True):
        buffers = received(buffers, device.sent(sent, channel), row)
    return buffers


def _no_numbers(half: Half) -> np.ndarray:
    return np.zeros_like(half.kind)


class _Forward:
    """The first half of every tick."""

    def __init__(self, scan: Scan, device: Device) -> None:
        self._scan, self._device, self._stash = scan, device, scan.stash
        self._branches, what, self.numbers = scan.branches(scan.table.forward, ["F"], self._branch)
        leaving = [i if scan.programs else None for _, i in what]
        self._writing = scan.writing(self._stash, leaving)

    def step(self, carry: Carry, branch: jax.Array, now: Half) -> tuple[Carry, Values]:
        device, types = self._device, self._scan.activations.types

        def idle(activations: Buffers, stash: Buffers, loss: LossTerms, states: Any) -> Any:
            return device.vary((nothing(types), self._writing.idle(stash), loss, states))

        def run(own: Branch) -> Branch:
            return lambda *buffers: device.vary(own(now, *buffers))

        y, left, loss, states = lax.switch(
            branch,
            [idle, *map(run, self._branches)],
            carry.activations,
            carry.stash,
            carry.totals.loss,
            carry.totals.states,
        )
        stash = self._writing.taken(carry.stash, left, now.stash, branch)
        totals = carry.totals._replace(loss=loss, states=states)
        return carry._replace(stash=stash, totals=totals), y

    def _branch(self, _: str, i: int) -> Branch:
        scan, device, kind = self._scan, self._device, self._scan.kinds[i]

        def run(
            now: Half, activations: Buffers, stash: Buffers, loss: LossTerms, states: Any
        ) -> Any:
            weights = kind.weights.read(device.buffers, now.model_stage)
            microbatch, x = device.microbatch(now), None
            if not kind.is_first:
                arrived = [row_of(x, now.source) for x in activations]
                x = scan.activations.tree(arrived)
            before = kind.states and kind.states.read(states, now.model_stage)
            given = kind.given(x, before)
            if scan.programs is None:
                y, left = kind.fn(weights, given, microbatch), self._writing.idle(stash)
            else:
                y, values = scan.programs[i].forward(weights, given, microbatch)
                left = self._writing.left(stash, i, now.stash, values)
            if kind.states is not None:
                after = tuple(y.state if kind.is_last else y.states)
                states = kind.states.written(states, after, now.model_stage)
            if not kind.is_last:
                y = y.x if isinstance(y, WithState) else y
                return scan.activations.flat(y), left, loss, states
            y = y._replace(state=None)
            loss = jax.tree.map(lambda total, own: total + own.astype(total.dtype), loss, y)
            return nothing(scan.activations.types), left, loss, states

        return run


class _Backward:
    """The second half of every tick."""

    def __init__(self, scan: Scan, device: Device) -> None:
        assert scan.programs is not None
        self._scan, self._device, self._programs = scan, device, scan.programs
        self._stash, self._kept = scan.stash, scan.kept
        kinds = ["B", "W", "BW"]
        self._branches, what, self.numbers = scan.branches(scan.table.backward, kinds, self._branch)
        leaving = [i if operation == "B" else None for operation, i in what]
        self._writing = scan.writing(self._kept, leaving)

    def step(self, carry: Carry, branch: jax.Array, now: Half) -> Carry:
        device, types = self._device, self._scan.activations.cotangents

        def idle(cotangents: Buffers, stash: Buffers, kept: Buffers, grads: Any) -> Any:
            return device.vary((nothing(types), self._writing.idle(kept), grads))

        def run(own: Branch) -> Branch:
            return lambda *buffers: device.vary(own(now, *buffers))

        sent, left, grads = lax.switch(
            branch,
            [idle, *map(run, self._branches)],
            carry.cotangents,
            carry.stash,
            carry.kept,
            carry.totals.grads,
        )
        kept = self._writing.taken(carry.kept, left, now.kept, branch)
        totals = carry.totals._replace(grads=grads)
        return carry._replace(sent=sent, kept=kept, totals=totals)

    def _branch(self, operation: str, i: int) -> Branch:
        scan, device = self._scan, self._device
        kind, program = scan.kinds[i], self._programs[i]

        def run(now: Half, cotangents: Buffers, stash: Buffers, kept: Buffers, grads: Any) -> Any:
            weights = kind.weights.read(device.buffers, now.model_stage)
            microbatch = device.microbatch(now)
            values = self._stash.read(stash, i, now.stash)
            left, dx, dw = self._writing.idle(kept), None, None
            if operation == "W":
                given = self._kept.read(kept, i, now.kept)
                dw = program.backward_weight(weights, microbatch, values, given)
            else:
                dy = self._cotangent(kind, cotangents, now)
                if operation == "BW":
                    dx, dw = program.backward(weights, microbatch, values, dy)
                else:
                    dx, given = program.backward_input(weights, microbatch, values, dy)
                    left = self._writing.left(kept, i, now.kept, given)
            if dw is not None:
                in_place = scan.in_branches
                grads = kind.weights.added(grads, dw, now.model_stage, in_place=in_place)
            if operation == "W" or kind.is_first:
                return nothing(scan.activations.cotangents), left, grads
            dx = dx.x if isinstance(dx, WithState) else dx
            return scan.activations.flat_cotangents(dx), left, grads

        return run

    def _cotangent(self, kind: StageKind, cotangents: Buffers, now: Half) -> PyTree:
        activations = self._scan.activations
        if kind.is_last:
            return jnp.asarray(self._scan.seed, self._scan.loss.total.dtype)
        arrived = [row_of(x, now.source) for x in cotangents]
        dy = activations.cotangent_tree(arrived)
        if kind.states is None:
            return dy
        return WithState(dy, jax.tree.map(lambda _: None, kind.states.empty()))
