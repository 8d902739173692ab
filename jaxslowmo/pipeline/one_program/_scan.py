"""The program of one device: a scan over the ticks of a schedule.

An operation works on one microbatch at one stage of the model: F is its forward pass, B computes
the gradient of its input, W that of its weights, and BW both. Each tick has two halves: a device
runs at most one F, then at most one of B, W and BW. A device may hold several stages of the model.
"""

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
from ...tree import at_least_float32
from .._pipelined import microbatch_of
from .._plan import Plan, Totals
from .._split_stage import StageProgram
from ..model import LossTerms, without_state
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
    """The values on a device during one step.

    Attributes:
      buffers: parameters of the device's layers, maps names to arrays (*sizes, elements), where
        sizes are those of the axes inside a stage that split the buffer's leaves.
      states: model state of the device's layers, maps names to arrays (elements,).
      layouts: sharding of each buffer over axes that the compiler handles; None: whole.
      batch: leaves (microbatches, examples, ...), but `Shared` leaves whole.
      rng: the PRNG key of the step, or None.
      shifts: (stages of the model,) ints, index of the first layer of a stage, less that of the
        first stage of the same kind, for which the program was traced.
      axis_name: the mesh axis along which each device has other stages of the model.
    """

    buffers: dict[str, jax.Array]
    states: dict[str, jax.Array]
    layouts: Mapping[str, P | None]
    batch: PyTree
    rng: Any
    shifts: np.ndarray
    axis_name: str

    def microbatch(self, now: Half) -> PyTree:
        """Return the microbatch of an operation."""
        shift = jnp.asarray(self.shifts)[now.model_stage]
        return microbatch_of(self.batch, self.rng, now.microbatch, shift)

    def sent(self, leaves: Sequence[jax.Array], channel: Channel) -> list[jax.Array]:
        """Send arrays over a channel, and return those that arrive on this device.

        Communication: one collective-permute per array; none for a channel in which every sender is
          its own receiver.
        """
        if all(sender == receiver for sender, receiver in channel):
            return list(leaves)
        return [lax.ppermute(x, self.axis_name, channel) for x in leaves]

    def column(self, table: np.ndarray) -> jax.Array:
        """Return this device's column of a table (ticks, devices along `axis_name`)."""
        stage = lax.axis_index(self.axis_name)
        return lax.dynamic_index_in_dim(jnp.asarray(table), stage, 1, keepdims=False)

    def zero_gradient(self, name: str) -> jax.Array | None:
        """Return zeros to which a buffer's gradients are added; None for a buffer of integers."""
        buffer, layout = self.buffers[name], self.layouts[name]
        if not jnp.issubdtype(buffer.dtype, jnp.inexact):
            return None
        zeros = jnp.zeros(buffer.shape, at_least_float32(buffer.dtype))
        return zeros if layout is None else lax.with_sharding_constraint(zeros, layout)


class ScanCarry(NamedTuple):
    """The values that a device keeps from one tick to the next.

    Attributes:
      activations: activations that have arrived and wait for the F that reads them.
      cotangents: cotangents that have arrived and wait for the B or BW that reads them.
      sent: cotangents that the previous tick has computed; this tick begins by sending them.
      stash: arrays that F has stored for B, W and BW.
      kept: arrays that B has stored for W.
      totals: the sums of loss and gradients so far, and the model state.
    """

    activations: Buffers
    cotangents: Buffers
    sent: list[jax.Array]
    stash: Buffers
    kept: Buffers
    totals: Totals


@dataclass(frozen=True)
class Activations:
    """The type of the activations that every stage sends to the next.

    Attributes:
      treedef: structure of the activations.
      types: types of the leaves.
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
        """Return the leaves of activations, in the dtypes of this type."""
        leaves = jax.tree.leaves(y)
        return [jnp.asarray(x, t.dtype) for x, t in zip(leaves, self.types, strict=True)]

    def tree(self, leaves: Values) -> PyTree:
        """Return the activations with these leaves: the inverse of `flat`."""
        return self.treedef.unflatten(leaves)

    def flat_cotangents(self, dx: PyTree) -> list[jax.Array]:
        """Return the leaves of a tree of cotangents, without those that have no cotangent."""
        leaves = self.treedef.flatten_up_to(dx)
        return [jnp.asarray(leaves[i], self.types[i].dtype) for i in self.floating]

    def cotangent_tree(self, leaves: Values) -> PyTree:
        """Return the tree with these cotangents, the inverse of `flat_cotangents`.

        Leaves of activations that have no cotangent, such as integers, are None in it.
        """
        by_position = dict(zip(self.floating, leaves, strict=True))
        return self.treedef.unflatten([by_position.get(i) for i in range(len(self.types))])


@dataclass(frozen=True)
class Scan:
    """The program of a schedule, a scan over its ticks, made of operations that were traced before.

    Attributes:
      plan: the plan of the pipeline.
      table: the table of the schedule.
      programs: operations of each kind of stage, where stages of one kind run the same program;
        None if there are only forward passes.
      activations: the type of activations.
      loss: types of the terms of the loss, the result of the last stage.
      in_branches: whether branches write into the buffers; see `BufferWriting`.
    """

    plan: Plan
    table: TickTable
    programs: Sequence[StageProgram] | None
    activations: Activations
    loss: LossTerms
    in_branches: bool

    def run(self, device: Device) -> Totals:
        """Run all ticks; return the sums of loss and gradients, for the stages of this device.

        Communication: in each tick, for each channel of the schedule, that of `Device.sent` for the
          arrays of an activation and, if there are backward passes, for those of a cotangent.
        """
        forward = _Forward(self, device)
        backward = None if self.programs is None else _Backward(self, device)
        channels = self.table.channels
        channels_back = [
            tuple((receiver, sender) for sender, receiver in channel) for channel in channels
        ]

        def tick(carry: ScanCarry, now: Any) -> tuple[ScanCarry, None]:
            (f_branch, f), (b_branch, b) = now
            if backward is not None:
                arrived = _receive(device, carry.cotangents, carry.sent, b, channels_back)
                carry = carry._replace(cotangents=arrived)
            with jax.named_scope("F"):
                carry, y = forward.step(carry, f_branch, f)
            if backward is not None:
                with jax.named_scope("B"):
                    carry = backward.step(carry, b_branch, b)
            arrived = _receive(device, carry.activations, y, f, channels)
            return carry._replace(activations=arrived), None

        all_idle = np.zeros_like(self.table.backward.kind)
        # For each half of a tick: the number of the branch to run, and the operation.
        halves = [
            (forward.numbers, self.table.forward),
            (all_idle if backward is None else backward.numbers, self.table.backward),
        ]
        columns = jax.tree.map(device.column, halves)
        return lax.scan(tick, self._start(device), columns)[0].totals

    @property
    def stash(self) -> Ring:
        """The layout of the buffers for arrays that F stores."""
        return self._ring(self.table.stash, lambda program: program.stash)

    @property
    def kept(self) -> Ring:
        """The layout of the buffers for arrays that B stores for W."""
        return self._ring(self.table.kept, lambda program: program.kept)

    def _ring(self, rows: Sequence[int], types_of: Callable[[StageProgram], Sequence[Any]]) -> Ring:
        """Return a layout of buffers, for the rows that each stage of the model needs."""
        programs, of_stage = self.programs or (), self.plan.of_stage
        # A kind of stages has as many rows as the one that needs most; without rows no buffers.
        of_kinds = [int(np.max(np.asarray(rows)[of_stage == i])) for i in range(len(programs))]
        pairs = zip(programs, of_kinds, strict=True)
        return Ring([types_of(program) if n else () for program, n in pairs], of_kinds)

    def branches(
        self, half: Half, operations: Sequence[str]
    ) -> tuple[list[tuple[str, int]], np.ndarray]:
        """Return the branches for one half of the ticks, and which of them runs where.

        Returns:
          (operation, index of the kind of stage) for each branch, without the idle branch; and
          (ticks, devices) int32, the number of the branch that a device runs in a tick: 0 is the
          idle branch, n the n-th of the list.
        """
        numbers = np.zeros_like(half.kind)
        pairs: list[tuple[str, int]] = []
        of_stage = self.plan.of_stage
        for operation in operations:
            runs = half.kind == KINDS.index(operation)
            for i in np.unique(of_stage[half.model_stage[runs]]):
                pairs.append((operation, int(i)))
                numbers[runs & (of_stage[half.model_stage] == i)] = len(pairs)
        return pairs, numbers

    def _start(self, device: Device) -> ScanCarry:
        activation_rows, cotangent_rows = self.table.arrivals
        grads: dict[str, jax.Array | None] = dict.fromkeys(device.buffers)
        if self.programs is not None:
            grads = {name: device.zero_gradient(name) for name in device.buffers}
        return ScanCarry(
            activations=Ring([self.activations.types], [activation_rows]).start(),
            cotangents=Ring([self.activations.cotangents], [cotangent_rows]).start(),
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
    """Send arrays over all channels; return `buffers` with those that arrive on this device."""
    for channel, row in zip(channels, now.arrivals, strict=True):
        buffers = received(buffers, device.sent(sent, channel), row)
    return buffers


class _Forward:
    """The first half of every tick: F, or idle."""

    def __init__(self, scan: Scan, device: Device) -> None:
        self._scan, self._device = scan, device
        self._branches, self.numbers = scan.branches(scan.table.forward, ["F"])
        # Without backward passes no branch stores anything.
        kinds = [i if scan.programs else None for _, i in self._branches]
        self._writing = BufferWriting(scan.stash, kinds, in_branches=scan.in_branches)

    def step(self, carry: ScanCarry, branch: jax.Array, now: Half) -> tuple[ScanCarry, Values]:
        totals = carry.totals
        y, written, loss, states = lax.switch(
            branch,
            [self._idle, *(partial(self._run, i, now) for _, i in self._branches)],
            *(carry.activations, carry.stash, totals.loss, totals.states),
        )
        stash = self._writing.merged(carry.stash, written, now.stash, branch)
        return carry._replace(stash=stash, totals=totals._replace(loss=loss, states=states)), y

    def _idle(self, activations: Buffers, stash: Buffers, loss: LossTerms, states: Any) -> Any:
        return nothing(self._scan.activations.types), self._writing.idle(stash), loss, states

    def _run(
        self, i: int, now: Half, activations: Buffers, stash: Buffers, loss: Any, states: Any
    ) -> Any:
        """Run F of a stage of kind number `i`; return as `_idle`, with its results."""
        scan, kind = self._scan, self._scan.plan.kinds[i]
        weights = kind.weights.read(self._device.buffers, now.model_stage)
        microbatch, x = self._device.microbatch(now), None
        if not kind.is_first:
            x = scan.activations.tree([row_of(x, now.source) for x in activations])
        x = kind.with_state(x, kind.states and kind.states.read(states, now.model_stage))
        program = None if scan.programs is None else scan.programs[i]
        y, stashed, new_states = kind.forward(program, weights, x, microbatch)
        written = self._writing.idle(stash)
        if program is not None:
            written = self._writing.result(stash, i, now.stash, stashed)
        if kind.states is not None:
            states = kind.states.written(states, new_states, now.model_stage)
        if not kind.is_last:
            return scan.activations.flat(y), written, loss, states
        loss = jax.tree.map(lambda total, term: total + term.astype(total.dtype), loss, y)
        return nothing(scan.activations.types), written, loss, states


class _Backward:
    """The second half of every tick: B, W, BW, or idle."""

    def __init__(self, scan: Scan, device: Device) -> None:
        self._scan, self._device = scan, device
        self._stash, self._kept = scan.stash, scan.kept
        self._branches, self.numbers = scan.branches(scan.table.backward, ["B", "W", "BW"])
        # Only B stores arrays for a later operation.
        kinds = [i if operation == "B" else None for operation, i in self._branches]
        self._writing = BufferWriting(self._kept, kinds, in_branches=scan.in_branches)

    def step(self, carry: ScanCarry, branch: jax.Array, now: Half) -> ScanCarry:
        totals = carry.totals
        runs = [partial(self._run, operation, i, now) for operation, i in self._branches]
        sent, written, grads = lax.switch(
            branch,
            [self._idle, *runs],
            *(carry.cotangents, carry.stash, carry.kept, totals.grads),
        )
        kept = self._writing.merged(carry.kept, written, now.kept, branch)
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
        """Run B, W or BW of a stage of kind number `i`; return as `_idle`, with its results."""
        scan, plan, types = self._scan, self._scan.plan, self._scan.activations
        assert scan.programs is not None
        kind, program = plan.kinds[i], scan.programs[i]
        weights = kind.weights.read(self._device.buffers, now.model_stage)
        microbatch = self._device.microbatch(now)
        stashed = self._stash.read(stash, i, now.stash)
        written, dx, dw = self._writing.idle(kept), None, None
        if operation == "W":
            kept_by_b = self._kept.read(kept, i, now.kept)
            dw = program.backward_weight(weights, microbatch, stashed, kept_by_b)
        else:
            dy = None
            if not kind.is_last:
                dy = types.cotangent_tree([row_of(x, now.source) for x in cotangents])
            dy = plan.cotangent(kind, program, dy)
            if operation == "BW":
                dx, dw = program.backward(weights, microbatch, stashed, dy)
            else:
                dx, kept_by_b = program.backward_input(weights, microbatch, stashed, dy)
                written = self._writing.result(kept, i, now.kept, kept_by_b)
        if dw is not None:
            grads = kind.weights.added(grads, dw, now.model_stage, in_place=scan.in_branches)
        if operation == "W" or kind.is_first:
            return nothing(types.cotangents), written, grads
        return types.flat_cotangents(without_state(dx)), written, grads
