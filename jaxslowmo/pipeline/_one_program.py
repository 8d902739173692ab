"""A pipeline as one program: a scan over the ticks of its schedule, on all devices.

An operation works on one microbatch at one stage of the model: F is its forward pass, B computes
the gradient of its input, W that of its weights, and BW both. Each tick has two halves: a device
runs at most one F, then at most one of B, W and BW. A device may hold several stages of the model.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.types import PyTree
from ..mesh import position_key, restrict_spec
from ..tree import Staged, at_least_float32
from ._pipelined import Pipelined
from ._plan import Plan, StageKind, StepReduction, Totals, all_gather_leaf
from ._split_stage import StageProgram
from ._tick_table import KINDS, Channel, HalfTick, TickTable, forward_ticks, tick_table
from .model import (
    Loss,
    LossTerms,
    microbatch_specs,
    select_microbatch,
    split_microbatches,
    without_state,
)

Values = Sequence[jax.Array]
Buffers = list[jax.Array]


# A permute in an operation of some stages, which the devices of all stages have to join.
_PERMUTE = re.compile(r' collective-permute(?:-start)?\(.*op_name="[^"]*/[FB]/cond/[^"]*/([^"/]+)"')


class OneProgram(Pipelined):
    """A pipeline that runs as one program, a scan over the table of its schedule."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        split = {axis for axes in plan.layout.packing.axes.values() for axis in axes}
        if plan.schedule.num_stages > 1 and split - {*plan.data_axes}:
            self.check_compiled = _check_permutes

    @cached_property
    def _table(self) -> TickTable:
        return tick_table(self.schedule)

    @cached_property
    def _forward_table(self) -> TickTable:
        return tick_table(self.schedule, forward_ticks(self.schedule))

    def execute(
        self, stacked: Staged, states: PyTree, batch: PyTree, rng: Any, *, differentiates: bool
    ) -> tuple[tuple[Loss, dict[str, Any]], dict[str, Any]]:
        """Map one step over the stages and the data axes; see `Pipelined.execute`."""
        plan, table = self.plan, self._table if differentiates else self._forward_table
        context, axis_name = jax.sharding.get_abstract_mesh(), plan.axis_name
        manual = frozenset(context.manual_axes)
        if self.schedule.num_stages > 1 and axis_name in manual:
            raise ValueError(
                f"`axis_name` {axis_name!r} must not be mapped where a pipeline is called: in a "
                "step, place parameters as `layout.stack` does."
            )
        # If a data axis is mapped already, the caller has split the batch over it.
        data_axes = tuple(a for a in self.data_axes if a not in manual)
        outer_axes = tuple(a for a in self.data_axes if a in manual)
        shares = {a: self.mesh.shape[a] for a in data_axes}
        microbatches = split_microbatches(batch, self.schedule.num_microbatches, shares)
        if plan.batch_memory == "host":
            microbatches = jax.device_put(microbatches, jax.memory.Space.Host)
        new_axes = frozenset(a for a in (axis_name, *data_axes) if a not in manual)
        specs = {name: restrict_spec(spec, new_axes) for name, spec in self.layout.specs.items()}
        grad_specs = {
            name: spec
            for name, spec in specs.items()
            if differentiates and jnp.issubdtype(stacked[name].dtype, jnp.inexact)
        }
        mesh = self.mesh if context.empty else context
        reduction = StepReduction(plan, data_axes, outer_axes)

        def step(*arguments: Any) -> Any:
            return DeviceScan(plan, table, reduction, differentiates, *arguments).run()

        batch_specs = microbatch_specs(microbatches, data_axes)
        state_specs = P(axis_name) if axis_name in new_axes else P()
        mapped: Any = step
        if new_axes:  # empty if all are mapped already, which an axis of one stage may be
            mapped = jax.shard_map(
                step,
                mesh=mesh,
                axis_names=new_axes,
                in_specs=(specs, state_specs, batch_specs, P()),
                out_specs=(P(), state_specs, grad_specs),
                check_vma=False,
            )
        if context.empty:  # outside of jit, `shard_map` can only map all axes of a mesh
            mapped = jax.jit(mapped)
        microbatches = _reshard_explicit(microbatches, batch_specs, mesh)
        loss, after, grads = mapped(stacked.buffers, states, microbatches, rng)
        return (loss, after), grads


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

    def flatten(self, y: PyTree) -> list[jax.Array]:
        """Return the leaves of activations, in the dtypes of this type."""
        leaves = jax.tree.leaves(y)
        return [jnp.asarray(x, t.dtype) for x, t in zip(leaves, self.types, strict=True)]

    def flatten_cotangents(self, dx: PyTree) -> list[jax.Array]:
        """Return the leaves of a tree of cotangents, without those that have no cotangent."""
        leaves = self.treedef.flatten_up_to(dx)
        return [jnp.asarray(leaves[i], self.types[i].dtype) for i in self.floating]

    def unflatten_cotangents(self, leaves: Values) -> PyTree:
        """Return the tree with these cotangents, the inverse of `flatten_cotangents`.

        Leaves of activations that have no cotangent, such as integers, are None in it.
        """
        by_position = dict(zip(self.floating, leaves, strict=True))
        return self.treedef.unflatten([by_position.get(i) for i in range(len(self.types))])


class DeviceScan:
    """The program of one device, called under the mapped axes of the stages and the data.

    Args:
      plan: the plan of the pipeline.
      table: the operations of each device stage in each tick.
      reduction: the reductions at the end of the step.
      differentiates: whether to compute gradients.
      buffers: parameters of the device's layers, maps names to arrays (1, *sizes, elements), where
        sizes are those of the axes inside a stage that split the buffer's leaves.
      states: model state of the device's layers, maps names to arrays (1, elements).
      batch: leaves (microbatches, examples, ...), but `SharedLeaf` leaves whole.
      rng: the PRNG key of the step, or None.

    Communication: one all-gather, over the data axes, of each buffer that is sharded there.
    """

    def __init__(
        self,
        plan: Plan,
        table: TickTable,
        reduction: StepReduction,
        differentiates: bool,
        buffers: dict[str, jax.Array],
        states: dict[str, jax.Array],
        batch: PyTree,
        rng: Any,
    ) -> None:
        self._plan, self._table, self._reduction = plan, table, reduction
        self._differentiates, self._batch = differentiates, batch
        self._buffers = {n: all_gather_leaf(x[0], reduction.spec(n)) for n, x in buffers.items()}
        self._states = {name: x[0] for name, x in states.items()}
        self._rng = None if rng is None else position_key(rng, reduction.data_axes)
        zero = jnp.zeros((), jnp.int32)
        microbatch = self._microbatch(HalfTick(*[zero] * 6, arrivals=()))
        weights = [kind.weights.read(self._buffers, 0) for kind in plan.kinds]
        before = [kind.states and kind.states.read(self._states, 0) for kind in plan.kinds]
        self._activations, self._loss = stage_types(plan, weights, before, microbatch)
        self._programs: list[StageProgram] = []
        if differentiates:
            x = self._activations.treedef.unflatten(placeholders(self._activations.types))
            for kind, leaves, state in zip(plan.kinds, weights, before, strict=True):
                x_of_kind = kind.with_state(None if kind.is_first else x, state)
                self._programs.append(plan.stage_program(kind, leaves, x_of_kind, microbatch))
        self._stash = self._stage_buffers(table.stash, lambda program: program.stash)
        self._kept = self._stage_buffers(table.kept, lambda program: program.kept)
        self._in_branches = writes_in_branches(plan.mesh)

    def run(self) -> tuple[Loss, dict[str, Any], dict[str, Any]]:
        """Run all ticks; return the loss, equal on all devices, and a stage's state and gradients.

        Communication: in each tick, for each channel of the schedule, one collective-permute of
          each array of an activation and, if there are backward passes, of a cotangent; none for a
          channel in which every sender is its own receiver. At the end that of `StepReduction`.
        """
        table, channels = self._table, self._table.channels
        channels_back = [tuple((to, sender) for sender, to in channel) for channel in channels]
        forward, f_numbers = self._branches(table.forward, ["F"])
        backward, b_numbers = self._branches(table.backward, ["B", "W", "BW"])
        # Only F and B store arrays for later operations, and F does so for backward passes.
        f_writes = [i if self._differentiates else None for _, i in forward]
        stash_writer = BranchWriter(self._stash, f_writes, in_branches=self._in_branches)
        b_writes = [i if operation == "B" else None for operation, i in backward]
        kept_writer = BranchWriter(self._kept, b_writes, in_branches=self._in_branches)

        def forward_half(carry: ScanCarry, branch: Any, now: HalfTick) -> tuple[ScanCarry, Values]:
            def idle(activations: Buffers, stash: Buffers, loss: LossTerms, states: Any) -> Any:
                return placeholders(self._activations.types), stash_writer.idle(stash), loss, states

            runs = [partial(self._forward, stash_writer, i, now) for _, i in forward]
            totals = carry.totals
            y, written, loss, states = lax.switch(
                branch,
                [idle, *runs],
                *(carry.activations, carry.stash, totals.loss, totals.states),
            )
            stash = stash_writer.merge(carry.stash, written, now.stash, branch)
            return carry._replace(stash=stash, totals=totals._replace(loss=loss, states=states)), y

        def backward_half(carry: ScanCarry, branch: Any, now: HalfTick) -> ScanCarry:
            def idle(cotangents: Buffers, stash: Buffers, kept: Buffers, grads: Any) -> Any:
                return placeholders(self._activations.cotangents), kept_writer.idle(kept), grads

            runs = [partial(self._backward, kept_writer, *one, now) for one in backward]
            totals = carry.totals
            sent, written, grads = lax.switch(
                branch,
                [idle, *runs],
                *(carry.cotangents, carry.stash, carry.kept, totals.grads),
            )
            kept = kept_writer.merge(carry.kept, written, now.kept, branch)
            return carry._replace(sent=sent, kept=kept, totals=totals._replace(grads=grads))

        def tick(carry: ScanCarry, now: Any) -> tuple[ScanCarry, None]:
            (f_branch, f), (b_branch, b) = now
            if self._differentiates:
                arrived = self._receive(carry.cotangents, carry.sent, b, channels_back)
                carry = carry._replace(cotangents=arrived)
            with jax.named_scope("F"):
                carry, y = forward_half(carry, f_branch, f)
            if self._differentiates:
                with jax.named_scope("B"):
                    carry = backward_half(carry, b_branch, b)
            arrived = self._receive(carry.activations, y, f, channels)
            return carry._replace(activations=arrived), None

        # For each half of a tick: the number of the branch to run, and the operation.
        halves = (f_numbers, table.forward), (b_numbers, table.backward)
        stage = lax.axis_index(self._plan.axis_name)
        columns = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(jnp.asarray(x), stage, 1, keepdims=False), halves
        )
        totals = lax.scan(tick, self._init_carry(), columns)[0].totals
        loss = self._reduction.loss(totals.loss, self._loss.total.dtype)
        grads = self._reduction.gradients(totals, loss.weight) if self._differentiates else {}
        return loss, self._reduction.states(totals), grads

    def _microbatch(self, now: HalfTick) -> PyTree:
        shift = jnp.asarray(self._plan.shifts)[now.model_stage]
        return select_microbatch(self._batch, self._rng, now.microbatch, shift)

    def _stage_buffers(
        self, rows: Sequence[int], types_of: Callable[[StageProgram], Sequence[Any]]
    ) -> "StageBuffers":
        """Return a layout of buffers, for the rows that each stage of the model needs."""
        kind_index = self._plan.kind_index
        # A kind of stages has as many rows as the one that needs most; without rows no buffers.
        of_kinds = [
            int(np.max(np.asarray(rows)[kind_index == i])) for i in range(len(self._programs))
        ]
        pairs = zip(self._programs, of_kinds, strict=True)
        return StageBuffers([types_of(program) if n else () for program, n in pairs], of_kinds)

    def _branches(
        self, half: HalfTick, operations: Sequence[str]
    ) -> tuple[list[tuple[str, int]], np.ndarray]:
        """Return the branches for one half of the ticks, and which of them runs where.

        Returns:
          (operation, index of the kind of stage) for each branch, without the idle branch; and
          (ticks, devices) int32, the number of the branch that a device runs in a tick: 0 is the
          idle branch, n the n-th of the list.
        """
        numbers = np.zeros_like(half.kind)
        pairs: list[tuple[str, int]] = []
        kind_index = self._plan.kind_index
        for operation in operations:
            runs = half.kind == KINDS.index(operation)
            for i in np.unique(kind_index[half.model_stage[runs]]):
                pairs.append((operation, int(i)))
                numbers[runs & (kind_index[half.model_stage] == i)] = len(pairs)
        return pairs, numbers

    def _init_carry(self) -> ScanCarry:
        types = self._activations
        activation_rows, cotangent_rows = self._table.arrivals
        loss = jax.tree.map(lambda x: jnp.zeros((), at_least_float32(x.dtype)), self._loss)
        grads = {n: self._zero_gradient(n) if self._differentiates else None for n in self._buffers}
        return ScanCarry(
            activations=StageBuffers([types.types], [activation_rows]).zeros(),
            cotangents=StageBuffers([types.cotangents], [cotangent_rows]).zeros(),
            sent=placeholders(types.cotangents),
            stash=self._stash.zeros(),
            kept=self._kept.zeros(),
            totals=Totals(loss, grads, self._states),
        )

    def _zero_gradient(self, name: str) -> jax.Array | None:
        """Return zeros to which a buffer's gradients are added; None for a buffer of integers."""
        buffer = self._buffers[name]
        if not jnp.issubdtype(buffer.dtype, jnp.inexact):
            return None
        zeros = jnp.zeros(buffer.shape, at_least_float32(buffer.dtype))
        automatic = frozenset(jax.sharding.get_abstract_mesh().auto_axes)
        layout = restrict_spec(self._plan.layout.specs[name][1:], automatic)
        return lax.with_sharding_constraint(zeros, layout) if any(layout) else zeros

    def _receive(
        self, buffers: Buffers, sent: Values, now: HalfTick, channels: Sequence[Channel]
    ) -> Buffers:
        """Send arrays over all channels; return `buffers` with those that arrive here."""
        for channel, row in zip(channels, now.arrivals, strict=True):
            arrived = sent
            if any(sender != receiver for sender, receiver in channel):
                arrived = [lax.ppermute(x, self._plan.axis_name, channel) for x in sent]
            at, has_row = jnp.maximum(row, 0), row >= 0
            pairs = zip(buffers, arrived, strict=True)
            buffers = [write_row_if(*pair, at, has_row) for pair in pairs]
        return buffers

    def _forward(
        self,
        stash_writer: "BranchWriter",
        i: int,
        now: HalfTick,
        activations: Buffers,
        stash: Buffers,
        loss: Any,
        states: Any,
    ) -> Any:
        """Run F of a stage of kind number `i`; return as an idle device does, with its results."""
        kind: StageKind = self._plan.kinds[i]
        weights = kind.weights.read(self._buffers, now.model_stage)
        microbatch, x = self._microbatch(now), None
        if not kind.is_first:
            rows = [read_row(x, now.source) for x in activations]
            x = self._activations.treedef.unflatten(rows)
        x = kind.with_state(x, kind.states and kind.states.read(states, now.model_stage))
        program = self._programs[i] if self._differentiates else None
        y, stashed, new_states = kind.forward(program, weights, x, microbatch)
        written = stash_writer.idle(stash)
        if program is not None:
            written = stash_writer.result(stash, i, now.stash, stashed)
        if kind.states is not None:
            states = kind.states.write(states, new_states, now.model_stage)
        if not kind.is_last:
            return self._activations.flatten(y), written, loss, states
        loss = jax.tree.map(lambda total, term: total + term.astype(total.dtype), loss, y)
        return placeholders(self._activations.types), written, loss, states

    def _backward(
        self,
        kept_writer: "BranchWriter",
        operation: str,
        i: int,
        now: HalfTick,
        cotangents: Buffers,
        stash: Buffers,
        kept: Buffers,
        grads: Any,
    ) -> Any:
        """Run B, W or BW of a stage of kind number `i`; return as `_forward` does."""
        kind, program, types = self._plan.kinds[i], self._programs[i], self._activations
        weights = kind.weights.read(self._buffers, now.model_stage)
        microbatch = self._microbatch(now)
        stashed = self._stash.read(stash, i, now.stash)
        written, dx, dw = kept_writer.idle(kept), None, None
        if operation == "W":
            kept_by_b = self._kept.read(kept, i, now.kept)
            dw = program.backward_weight(weights, microbatch, stashed, kept_by_b)
        else:
            dy = None
            if not kind.is_last:
                dy = types.unflatten_cotangents([read_row(x, now.source) for x in cotangents])
            dy = self._plan.cotangent(kind, program, dy)
            if operation == "BW":
                dx, dw = program.backward(weights, microbatch, stashed, dy)
            else:
                dx, kept_by_b = program.backward_input(weights, microbatch, stashed, dy)
                written = kept_writer.result(kept, i, now.kept, kept_by_b)
        if dw is not None:
            grads = kind.weights.accumulate(grads, dw, now.model_stage, in_place=self._in_branches)
        if operation == "W" or kind.is_first:
            return placeholders(types.cotangents), written, grads
        return types.flatten_cotangents(without_state(dx)), written, grads


def _check_permutes(text: str) -> None:
    """Raise `ValueError` if an operation that some stages run waits for devices of all stages.

    The compiler does so where a layer moves activations between the axes that shard parameters,
    such as by `with_sharding_constraint`.
    """
    if match := _PERMUTE.search(text):
        raise ValueError(
            f"`loss_fn`: for {match[1]!r} of a layer the compiler permutes an array among all "
            "stages, which would wait for the others forever: leave out sharding constraints in "
            'layers, or use `executor`="host".'
        )


def stage_types(
    plan: Plan, weights: Sequence[PyTree], states: Sequence[PyTree], microbatch: PyTree
) -> tuple[Activations, LossTerms]:
    """Return the types of activations and of the last stage's result, by tracing all stages.

    Args:
      plan: the plan of the pipeline.
      weights: the leaves of a stage of each kind.
      states: its model state.
      microbatch: a microbatch.

    Raises:
      ValueError: results of two stages that differ in structure, shapes or dtypes.
    """

    def run_stages(
        weights: Sequence[PyTree], states: Sequence[PyTree], microbatch: PyTree
    ) -> list[PyTree]:
        results: list[PyTree] = []
        known_results: dict[Any, PyTree] = {}
        x = None
        for i in plan.kind_index:
            # Stages of one kind with inputs of equal types have results of equal types.
            key = int(i), str(jax.tree.map(jax.typeof, x))
            if key not in known_results:
                argument = plan.kinds[i].with_state(x, states[i])
                known_results[key] = plan.kinds[i].fn(weights[i], argument, microbatch)
            x = without_state(known_results[key])
            results.append(x)
        return results

    types = jax.tree.map(jax.typeof, (weights, states, microbatch))
    results = jax.make_jaxpr(run_stages, return_shape=True)(*types)[1]
    structs = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), y) for y in results]
    sent = [Activations(jax.tree.structure(y), tuple(jax.tree.leaves(y))) for y in structs[:-1]]
    for k, other in enumerate(sent):
        if other != sent[0]:
            raise ValueError(
                "`model`: in one program activations must have one type, and stage 0 gives "
                f"{structs[0]}, stage {k} {structs[k]}: choose other `parts`, or "
                '`executor`="host".'
            )
    none = Activations(jax.tree.structure(()), ())
    return sent[0] if sent else none, results[-1]._replace(state=None)


# Buffers with numbered rows.


def placeholder(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Return the placeholder for a row that holds no value; nothing may depend on it."""
    return jnp.zeros(shape, dtype)


def placeholders(types: Sequence[Any]) -> list[jax.Array]:
    """Return placeholders of these types, which a device sends if it has no result to send."""
    return [placeholder(x.shape, x.dtype) for x in types]


class StageBuffers:
    """A layout of buffers whose rows each hold the values of a stage, of any of several kinds.

    Values of different kinds with equal shape and dtype share a buffer, which has as many rows as
    the kind that needs most.

    Args:
      kinds: types of the values of each kind of stage.
      rows: number of rows that each kind of stage needs.

    Attributes:
      types: the type of a row of each buffer.
    """

    def __init__(self, kinds: Sequence[Sequence[Any]], rows: Sequence[int]) -> None:
        self.types: list[jax.ShapeDtypeStruct] = []
        self._rows: list[int] = []
        self._places: list[list[int]] = []
        for values, count in zip(kinds, rows, strict=True):
            free = list(range(len(self.types)))
            places = []
            for value in values:
                kind = jax.ShapeDtypeStruct(value.shape, value.dtype)
                place = next((i for i in free if self.types[i] == kind), None)
                if place is None:
                    place = len(self.types)
                    self.types.append(kind)
                    self._rows.append(count)
                else:
                    free.remove(place)
                    self._rows[place] = max(self._rows[place], count)
                places.append(place)
            self._places.append(places)

    def zeros(self) -> Buffers:
        """Return buffers without values."""
        types = zip(self._rows, self.types, strict=True)
        return [placeholder((rows, *x.shape), x.dtype) for rows, x in types]

    def read(self, buffers: Buffers, kind: int, row: jax.Array) -> tuple[jax.Array, ...]:
        """Return the values of a stage of this kind in a row."""
        return tuple(read_row(buffers[i], row) for i in self._places[kind])

    def write(self, buffers: Buffers, kind: int, row: jax.Array, values: Values) -> Buffers:
        """Return `buffers` with the values of a stage of this kind written to a row."""
        new = list(buffers)
        for i, value in zip(self._places[kind], values, strict=True):
            new[i] = write_row(new[i], row, value)
        return new

    def values_by_buffer(self, kind: int, values: Values) -> list[jax.Array]:
        """Return the values of a stage of this kind by buffer; placeholders for other buffers."""
        rows = placeholders(self.types)
        for i, value in zip(self._places[kind], values, strict=True):
            rows[i] = value.astype(rows[i].dtype)
        return rows

    def buffer_mask(self, kind: int | None) -> np.ndarray:
        """Return (buffers,) bool: whether a stage of this kind has values there; None: no."""
        is_used = np.zeros(len(self.types), bool)
        if kind is not None:
            is_used[self._places[kind]] = True
        return is_used


def read_row(buffer: jax.Array, row: Any) -> jax.Array:
    """Return a row of a buffer; for a buffer of one row, with a constant index."""
    row = 0 if buffer.shape[0] == 1 else row
    return lax.dynamic_index_in_dim(buffer, row, 0, keepdims=False)


def write_row(buffer: jax.Array, row: Any, value: jax.Array) -> jax.Array:
    """Return `buffer` with one row replaced."""
    return lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), row, 0)


def write_row_if(
    buffer: jax.Array, value: jax.Array, row: jax.Array, is_set: jax.Array
) -> jax.Array:
    """Return `buffer` with a row replaced if `is_set`; only this row is copied in either case."""
    row = jnp.minimum(row, buffer.shape[0] - 1)
    return write_row(buffer, row, jnp.where(is_set, value, read_row(buffer, row)))


class BranchWriter:
    """The way in which branches of a conditional write rows to buffers.

    On TPU the compiler writes to the buffers in place inside of branches, so branches return the
    buffers with a row written. Other compilers copy all results of a branch: there a branch returns
    only the row, which is written after the conditional. That takes the memory of a few more rows.

    Args:
      layout: the layout of the buffers.
      kinds: the kind of stage whose values each branch writes, without branch 0, which is idle;
        None for a branch that writes nothing.
      in_branches: whether branches write; see `writes_in_branches`.
    """

    def __init__(
        self, layout: StageBuffers, kinds: Sequence[int | None], *, in_branches: bool
    ) -> None:
        self._layout, self._in_branches = layout, in_branches
        self._masks = np.stack([layout.buffer_mask(kind) for kind in (None, *kinds)])

    def idle(self, buffers: Buffers) -> Values:
        """Return the result of a branch that writes nothing."""
        return buffers if self._in_branches else placeholders(self._layout.types)

    def result(self, buffers: Buffers, kind: int, row: jax.Array, values: Values) -> Values:
        """Return the result of a branch that writes a stage's values to a row."""
        if self._in_branches:
            return self._layout.write(buffers, kind, row, values)
        return self._layout.values_by_buffer(kind, values)

    def merge(self, buffers: Buffers, result: Values, row: jax.Array, branch: jax.Array) -> Buffers:
        """Return the buffers after branch number `branch` has returned `result`."""
        if self._in_branches:
            return list(result)
        is_set = jnp.asarray(self._masks)[branch]
        pairs = zip(buffers, result, strict=True)
        return [write_row_if(*pair, row, is_set[i]) for i, pair in enumerate(pairs)]


def writes_in_branches(mesh: Mesh) -> bool:
    """Return whether the compiler for these devices writes to buffers in place in branches."""
    return mesh.devices.flat[0].platform == "tpu"


def _reshard_explicit(tree: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return `tree` resharded to `specs` over Explicit axes; others are left to jit."""
    explicit = frozenset(mesh.explicit_axes)

    def place(x: jax.Array, spec: P) -> jax.Array:
        new_spec = restrict_spec(spec, explicit)
        return jax.sharding.reshard(x, NamedSharding(mesh, new_spec)) if any(new_spec) else x

    return jax.tree.map(place, tree, specs) if explicit else tree
