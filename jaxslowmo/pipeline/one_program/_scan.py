"""The program of one device: a scan over the ticks of a schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ..._support.types import PyTree
from ...mesh import vary_over
from ...tree import at_least_float32
from ..model import LossTerms, without_state
from ..plan import Plan, Totals, microbatch_of
from ._tick_table import (
    KINDS,
    Buffers,
    BufferWriting,
    Channel,
    Half,
    Ring,
    TickTable,
    Values,
    nothing,
    received,
    row_of,
)


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

    def vary(self, tree: PyTree) -> PyTree:
        """`tree` typed as all values here are: branches must agree."""
        return vary_over(tree, self.axes)

    def switch(self, branch: jax.Array, fns: Sequence[Callable[..., Any]], *operands: Any) -> Any:
        """Return the results of one of several functions, typed alike."""
        varied = [lambda *own, fn=fn: self.vary(fn(*own)) for fn in fns]
        return lax.switch(branch, varied, *operands)

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


class ScanCarry(NamedTuple):
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
class Activations:
    """The type of what every stage but the last gives to the next.

    Attributes:
      treedef: of it.
      types: of its leaves.
    """

    treedef: Any
    types: tuple[Any, ...]

    @property
    def floating(self) -> tuple[int, ...]:
        """Positions of the leaves that have cotangents."""
        return tuple(i for i, x in enumerate(self.types) if jnp.issubdtype(x.dtype, jnp.inexact))

    @property
    def cotangents(self) -> tuple[Any, ...]:
        """Types of the cotangents."""
        return tuple(self.types[i] for i in self.floating)

    def flat(self, y: PyTree) -> list[jax.Array]:
        """The leaves, of the dtypes that the type says."""
        leaves = jax.tree.leaves(y)
        return [jnp.asarray(x, t.dtype) for x, t in zip(leaves, self.types, strict=True)]

    def tree(self, leaves: Values) -> PyTree:
        """The way back from `flat`."""
        return self.treedef.unflatten(leaves)

    def flat_cotangents(self, dx: PyTree) -> list[jax.Array]:
        """Of a tree with None for leaves without any."""
        leaves = self.treedef.flatten_up_to(dx)
        return [jnp.asarray(leaves[i], self.types[i].dtype) for i in self.floating]

    def cotangent_tree(self, leaves: Values) -> PyTree:
        """The way back from `flat_cotangents`."""
        own = dict(zip(self.floating, leaves, strict=True))
        return self.treedef.unflatten([own.get(i) for i in range(len(self.types))])


@dataclass(frozen=True)
class Scan:
    """A schedule's program, given what its stages compute.

    Attributes:
      plan: the pipeline.
      table: of the schedule.
      programs: per kind of stage its operations; None for forward passes alone.
      activations: what travels.
      loss: types of what the last stage gives.
      in_branches: whether branches write into the buffers; see `BufferWriting`.
    """

    plan: Plan
    table: TickTable
    programs: Sequence[Any] | None
    activations: Activations
    loss: LossTerms
    in_branches: bool

    def run(self, device: Device) -> Totals:
        """Sums over microbatches of loss and gradients, of the stages that this device holds.

        Communication: per tick one collective-permute of an activation for each channel of the
          schedule, and one of its cotangent, over the stages.
        """
        forward = _Forward(self, device)
        backward = None if self.programs is None else _Backward(self, device)
        ways = self.table.channels
        ways_back = [tuple((to, at) for at, to in channel) for channel in ways]

        def tick(carry: ScanCarry, now: Any) -> tuple[ScanCarry, None]:
            (f_branch, f), (b_branch, b) = now
            if backward is not None:
                arrived = _receive(device, carry.cotangents, carry.sent, b, ways_back)
                carry = carry._replace(cotangents=arrived)
            with jax.named_scope("F"):
                carry, y = forward.step(carry, f_branch, f)
            if backward is not None:
                with jax.named_scope("B"):
                    carry = backward.step(carry, b_branch, b)
            arrived = _receive(device, carry.activations, y, f, ways)
            return carry._replace(activations=arrived), None

        idle = np.zeros_like(self.table.backward.kind)
        halves = [
            (forward.numbers, self.table.forward),
            (idle if backward is None else backward.numbers, self.table.backward),
        ]
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

    def _rows(self, of_model_stages: Sequence[int]) -> list[int]:
        """The most rows that a stage of each kind needs."""
        of_kinds = [0] * len(self.programs or ())
        for i, count in zip(self.plan.of_stage, of_model_stages, strict=True) if of_kinds else ():
            of_kinds[i] = max(of_kinds[i], count)
        return of_kinds

    def branches(
        self, half: Half, operations: Sequence[str]
    ) -> tuple[list[tuple[str, int]], np.ndarray]:
        """Return the branches of half a tick, without that of doing nothing, and their numbers.

        Returns:
          For each branch that some device runs the operation and the kind of stage; and per tick
          and device the number of its branch: 0 for doing nothing, else 1 and up.
        """
        numbers = np.zeros_like(half.kind)
        found: list[tuple[str, int]] = []
        of_stage = self.plan.of_stage
        for operation in operations:
            runs = half.kind == KINDS.index(operation)
            for i in np.unique(of_stage[half.model_stage[runs]]):
                found.append((operation, int(i)))
                numbers[runs & (of_stage[half.model_stage] == i)] = len(found)
        return found, numbers

    def _start(self, device: Device) -> ScanCarry:
        of_x, of_dy = self.table.arrivals
        grads: dict[str, jax.Array | None] = dict.fromkeys(device.buffers)
        if self.programs is not None:
            grads = {name: device.zero_gradient(name) for name in device.buffers}
        return ScanCarry(
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


def _receive(
    device: Device, buffers: Buffers, sent: Values, now: Half, channels: Sequence[Channel]
) -> Buffers:
    for channel, row in zip(channels, now.arrivals, strict=True):
        buffers = received(buffers, device.sent(sent, channel), row)
    return buffers


class _Forward:
    """The first half of every tick."""

    def __init__(self, scan: Scan, device: Device) -> None:
        self._scan, self._device = scan, device
        self._branches, self.numbers = scan.branches(scan.table.forward, ["F"])
        leaving = [i if scan.programs else None for _, i in self._branches]
        self._writing = BufferWriting(scan.stash, leaving, in_branches=scan.in_branches)

    def step(self, carry: ScanCarry, branch: jax.Array, now: Half) -> tuple[ScanCarry, Values]:
        totals = carry.totals
        y, left, loss, states = self._device.switch(
            branch,
            [self._idle, *(partial(self._run, i, now) for _, i in self._branches)],
            *(carry.activations, carry.stash, totals.loss, totals.states),
        )
        stash = self._writing.taken(carry.stash, left, now.stash, branch)
        return carry._replace(stash=stash, totals=totals._replace(loss=loss, states=states)), y

    def _idle(self, activations: Buffers, stash: Buffers, loss: LossTerms, states: Any) -> Any:
        return nothing(self._scan.activations.types), self._writing.idle(stash), loss, states

    def _run(
        self, i: int, now: Half, activations: Buffers, stash: Buffers, loss: Any, states: Any
    ) -> Any:
        scan, kind = self._scan, self._scan.plan.kinds[i]
        weights = kind.weights.read(self._device.buffers, now.model_stage)
        microbatch, x = self._device.microbatch(now), None
        if not kind.is_first:
            x = scan.activations.tree([row_of(x, now.source) for x in activations])
        given = kind.given(x, kind.states and kind.states.read(states, now.model_stage))
        program = None if scan.programs is None else scan.programs[i]
        y, values, after = kind.forward(program, weights, given, microbatch)
        left = self._writing.idle(stash)
        if program is not None:
            left = self._writing.left(stash, i, now.stash, values)
        if kind.states is not None:
            states = kind.states.written(states, after, now.model_stage)
        if not kind.is_last:
            return scan.activations.flat(y), left, loss, states
        loss = jax.tree.map(lambda total, own: total + own.astype(total.dtype), loss, y)
        return nothing(scan.activations.types), left, loss, states


class _Backward:
    """The second half of every tick."""

    def __init__(self, scan: Scan, device: Device) -> None:
        self._scan, self._device = scan, device
        self._stash, self._kept = scan.stash, scan.kept
        self._branches, self.numbers = scan.branches(scan.table.backward, ["B", "W", "BW"])
        leaving = [i if operation == "B" else None for operation, i in self._branches]
        self._writing = BufferWriting(self._kept, leaving, in_branches=scan.in_branches)

    def step(self, carry: ScanCarry, branch: jax.Array, now: Half) -> ScanCarry:
        totals = carry.totals
        sent, left, grads = self._device.switch(
            branch,
            [self._idle, *(partial(self._run, *what, now) for what in self._branches)],
            *(carry.cotangents, carry.stash, carry.kept, totals.grads),
        )
        kept = self._writing.taken(carry.kept, left, now.kept, branch)
        return carry._replace(sent=sent, kept=kept, totals=totals._replace(grads=grads))

    def _idle(self, cotangents: Buffers, stash: Buffers, kept: Buffers, grads: Any) -> Any:
        return nothing(self._scan.activations.cotangents), self._writing.idle(kept), grads

    def _run(
        self,
        operation: str,
        i: int,
        now: Half,
        cotangents: Buffers,
        stash: Buffers,
        kept: Buffers,
        grads: Any,
    ) -> Any:
        scan, plan, types = self._scan, self._scan.plan, self._scan.activations
        assert scan.programs is not None
        kind, program = plan.kinds[i], scan.programs[i]
        weights = kind.weights.read(self._device.buffers, now.model_stage)
        microbatch = self._device.microbatch(now)
        values = self._stash.read(stash, i, now.stash)
        left, dx, dw = self._writing.idle(kept), None, None
        if operation == "W":
            given = self._kept.read(kept, i, now.kept)
            dw = program.backward_weight(weights, microbatch, values, given)
        else:
            dy = None
            if not kind.is_last:
                dy = types.cotangent_tree([row_of(x, now.source) for x in cotangents])
            dy = plan.cotangent(kind, program, dy)
            if operation == "BW":
                dx, dw = program.backward(weights, microbatch, values, dy)
            else:
                dx, given = program.backward_input(weights, microbatch, values, dy)
                left = self._writing.left(kept, i, now.kept, given)
        if dw is not None:
            grads = kind.weights.added(grads, dw, now.model_stage, in_place=scan.in_branches)
        if operation == "W" or kind.is_first:
            return nothing(types.cotangents), left, grads
        return types.flat_cotangents(without_state(dx)), left, grads
