"""The training step over all replicas: which program runs, and where its arguments lie."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType

from ..._typing import Phase, PyTree
from ..._warn import warn_once
from ...mesh import AnyMesh, VirtualMesh, axis_names, map_replicas
from ...tracing import ready_order
from ...transform import ParameterTransform, phase_name
from .._hyperparams import Numbers
from .._state import KnownLayout, Layout, TrainState
from ..batches import (
    Comparison,
    HostBatch,
    as_arrays,
    parts_given,
    placed_batch,
    placed_weight,
)
from ._evaluate import evaluated
from ._host import Counted, HostCounts, counted
from ._in_flight import StepsInFlight
from ._layouts import Layouts
from ._probe import check_remembered
from ._replica_step import Metrics, StepParts
from ._transforms import check_shards, check_transforms
from ._usable import refuse_unusable

Mode = Literal["traced", "host"]


class TrainStep:
    """A training step: `step(state, batch) -> (state, metrics)`. Made by `make_train_step`.

    Attributes:
      tx: the whole chain, for `TrainState.create`; `init` does that.
      mesh: the mesh it runs on.
      axis_name: the replica axis.
      mode: `"traced"` or `"host"`.
      host_batch: `"local"` or `"global"`.
      sync: the parameter transform, sized for the mesh; None without one. Programs use it
        `with_specs` of the parameters that they are for.
    """

    def __init__(
        self, parts: StepParts, mesh: AnyMesh, mode: Mode, host_batch: HostBatch, donate: bool
    ) -> None:
        self._parts = parts
        self.mesh, self.axis_name, self.mode = mesh, parts.axis_name, mode
        self.host_batch: HostBatch = host_batch
        self._donate = donate
        self.tx = parts.chain()
        self.sync = parts.sync
        self._warn = warn_once()
        self._is_probed = False
        self._numbers: Numbers | None = None
        self._programs: dict[Any, Any] = {}
        self._counts = HostCounts()
        self._layouts = Layouts(mesh, parts.axis_name)
        self._in_flight = StepsInFlight()
        self._compare = Comparison(mesh, host_batch)

    def init(
        self, params: PyTree, *, model_state: PyTree | None = None, seed: int = 0
    ) -> TrainState:
        """`TrainState.create` with this step's chain, mesh and axis."""
        state = TrainState.create(
            params,
            self.tx,
            mesh=self.mesh,
            axis_name=self.axis_name,
            model_state=model_state,
            seed=seed,
        )
        self._check_transforms(state)
        self._layouts.of(state)
        return state

    def phase(self, t: int) -> Phase:
        """What update t = 1, 2, ... exchanges beside gradients; `()` without a sync."""
        return () if self._parts.sync is None else self._parts.sync.phase(t)

    def next_phase(self, state: TrainState) -> Phase:
        """The phase of the update that `step(state, batch)` will do, known on the host."""
        refuse_unusable(state)
        sync, so_far = self._parts.sync, self._counted(state)
        return () if sync is None else sync.phase(so_far.updates + 1, so_far.skipped)

    def __call__(
        self, state: TrainState, batch: PyTree, weight: Any = None
    ) -> tuple[TrainState, Metrics]:
        """One update on every replica.

        Args:
          state: a `TrainState`; its buffers are donated where the step was made so.
          batch: leaves with leading dimension replicas * local batch, replica-major. In several
            processes NumPy arrays, arrays of other libraries on the CPU and jax arrays of this
            process are what `host_batch` says; an array over all processes is the whole batch.
          weight: (replicas,) each replica's share in averages >= 0, such as its number of samples;
            0 for one that has run out and follows the others, whatever its batch holds. None: all
            alike. See `js.uneven_batches`. With `host_batch="local"` in several processes one
            number for each replica of which this process has devices; processes that share a
            replica give the same.

        Returns:
          `(state, metrics)`: metrics are stacked per replica, (replicas,), "loss" among them; with
          a weight that too, and zeros for replicas of weight 0.

        Raises:
          ValueError: a batch that does not split evenly, a weight of another shape, a state whose
            buffers were donated; host-scheduled, a call inside of jax.jit or the like. On all
            processes: batches that do not fit together.

        Communication: the transforms'. In several processes, for batches of the host: none, but for
          a note of some bytes to the coordinator, and one back, at the first batch of a shape.
        """
        refuse_unusable(state)
        self._compare(as_arrays(batch), self._layouts.data_axes(self._layouts.of(state)))
        program, arguments = self._prepared(state, batch, weight)
        so_far = self._counts.get(_counter(state, self._parts.sync))
        layout = self._layouts.of(state)
        new_state, metrics = program(*arguments)
        self._in_flight.admit(metrics)
        # It lies where the old one did: on all mapped axes as the program says, else pinned.
        new_state.known_layout = KnownLayout(self.mesh, self.axis_name, layout)
        if so_far is not None:  # count on, without asking the device
            counter = _counter(new_state, self._parts.sync)
            self._counts.note(counter, so_far._replace(updates=so_far.updates + 1))
        return new_state, metrics

    def place(
        self, batch: PyTree, weight: Any = None, *, state: TrainState | None = None
    ) -> tuple[PyTree, Any]:
        """A batch and its weight on the devices, as a call would place them; nothing waits.

        The call that is given them copies nothing, so one batch is copied while another is used:
        `js.TrainPipeline` does that. What lies there already stays as it is.

        Args:
          batch: as a call takes it.
          weight: likewise.
          state: one as the batch is for, which tells over which axes parameters are sharded, and
            batches so are not. None: the last that this step has seen.

        Returns:
          `(batch, weight)`, arrays on the devices; weight None stays None.

        Raises:
          ValueError: as a call of batches and weights that do not fit.

        Communication: host to device; between processes as a call, instead of it.
        """
        layout = self._layouts.last if state is None else self._layouts.of(state)
        batch = as_arrays(batch)
        self._compare(batch, self._layouts.data_axes(layout))
        batch = self._placed_batch(batch, layout)
        weight = placed_weight(weight, self.mesh, self.axis_name, self.host_batch)
        if isinstance(self.mesh, VirtualMesh):  # one device, of which placing takes no note
            batch = jax.device_put(batch)
        return batch, weight

    def evaluate(self, state: TrainState, batch: PyTree, weight: Any = None) -> Metrics:
        """The metrics of a batch, each replica's with its own parameters: a forward pass alone.

        Nothing is updated, counted or donated. The loss function is called as in training, with
        the key of the update that would come next, and the model state that it returns is dropped.

        Args:
          state: a `TrainState`.
          batch: as a call takes it, of any size that splits evenly.
          weight: likewise; metrics of replicas of weight 0 are zeros.

        Returns:
          Metrics stacked per replica, (replicas,), "loss" among them; with a weight that too.

        Raises:
          ValueError: as a call.

        Communication: over inner axes one all-reduce of the metrics; with
          `model_state="broadcast"` one of the model state over the replicas.
        """
        refuse_unusable(state)
        layout = self._layouts.of(state)
        batch, weight = self.place(batch, weight, state=state)
        key = ("evaluate", layout.axes, layout.key)
        if key not in self._programs:
            inner = self._layouts.inner_axes(layout)
            mapped = map_replicas(
                lambda state, batch, weight: evaluated(self._parts, state, batch, weight, inner),
                mesh=self.mesh,
                axis_name=self.axis_name,
                in_roles=("stacked", "batch", "stacked"),
                automatic=layout.axes,
            )
            self._programs[key] = jax.jit(mapped)
        seen = state._replace(opt_state=())  # which an evaluation does not look at
        metrics = self._programs[key](seen, batch, weight)
        self._in_flight.admit(metrics)
        return metrics

    def compiled(self, state: TrainState, batch: PyTree, weight: Any = None) -> jax.stages.Compiled:
        """What `step(state, batch, weight)` runs, compiled now if it was not; nothing runs.

        The batch is as `step` takes it. Shapes without values (`ShapeDtypeStruct`) are of the whole
        batch, here and wherever nothing runs; processes are not compared.
        """
        program, arguments = self._prepared(state, batch, weight)
        return program.lower(*arguments).compile()

    def ready_order(self, state: TrainState, batch: PyTree) -> tuple[int, ...] | None:
        """`js.ready_order` of what one device computes.

        None for a loss function that uses a mapped axis; nothing runs.
        """
        axes = self._layouts.data_axes(self._layouts.of(state))

        def share(x: Any) -> jax.ShapeDtypeStruct:
            parts = parts_given(x, self.mesh, axes, self.host_batch)
            return jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), jnp.result_type(x))

        def own(x: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

        try:
            return ready_order(
                self._parts.loss,
                jax.tree.map(own, state.params),
                jax.tree.map(share, as_arrays(batch)),
                model_state=jax.tree.map(own, state.model_state),
            )
        except NameError:  # unbound axis name
            return None

    def traced_by_phase(
        self, state: TrainState, batch: PyTree
    ) -> dict[str | None, jax.stages.Traced]:
        """The step's programs, traced: by phase name when host-scheduled, else one under None.

        On a `VirtualMesh` they are traced for as many devices as it has replicas: what would be
        sent. Arguments may be `ShapeDtypeStruct`s; nothing runs. On a `Mesh` the step's own
        programs are traced, which its first updates then need not do again. A batch of arrays is
        as the step takes it, one of shapes is whole, also in several processes.
        """
        self._check_transforms(state)
        layout = self._layouts.of(state)
        mesh = _abstract(self.mesh) if isinstance(self.mesh, VirtualMesh) else self.mesh
        batch = self._placed_batch(batch, layout)

        def trace(phase: Phase | None) -> jax.stages.Traced:
            # Those that will run also depend on the placement of the state where the compiler
            # chooses it, and shapes alone need not tell.
            if layout.axes or mesh is not self.mesh:
                program = self._build(phase, layout, mesh)
            else:
                program = self._program(phase, layout, state, batch, None)
            return program.trace(state, batch, None)

        sync = self._parts.sync
        if self.mode == "traced":
            return {None: trace(None)}
        if sync is None:
            return {"every": trace(())}
        return {phase_name(p): trace(p) for p in sync.phases()}

    def _counted(self, state: TrainState) -> Counted:
        """The counter of the parameter transform (else the step), and what it skipped."""
        array = _counter(state, self._parts.sync)
        if isinstance(array, Tracer):
            raise ValueError(
                '`next_phase`, and with it every step with `mode`="host", reads the counter in '
                "`state`, which has no value inside of jax.jit, lax.scan and the like: call it "
                'outside, or use mode="traced", whose one program decides by itself.'
            )
        sync = self._parts.sync
        return self._counts.read(array, lambda: counted(array, sync, state.opt_state[-1]))

    def _check_transforms(self, state: TrainState) -> None:
        """What could not be seen before there was a state: which transforms chains consist of."""
        self._note_numbers(state)
        parts = self._parts
        check_transforms(
            state.opt_state,
            mode=self.mode,
            axis_name=self.axis_name,
            num_replicas=math.prod(self.mesh.shape[name] for name in axis_names(self.axis_name)),
            exchanges=parts.apart or parts.sync is not None or parts.gradients is not None,
        )
        if parts.sync is not None and not self._is_probed:
            self._is_probed = True
            optimizer, opt_state = parts.optimizer, state.opt_state[1]
            check_remembered(optimizer, opt_state, state.params, parts.sync, self._warn)

    def _note_numbers(self, state: TrainState) -> Numbers:
        """Where the optimizer keeps hyperparameters that one may set."""
        if self._numbers is None:
            self._numbers = Numbers(state.opt_state)
        return self._numbers

    def _parts_for(self, layout: Layout) -> StepParts:
        """The parts, for parameters of a layout: without their specs, exchanges would gather them.

        Where nobody gave specs the layout of what the transform keeps in shards stays: it is part
        of the state, and of its checkpoints.
        """
        sync = self._parts.sync
        if sync is None or layout.specs is None:
            return self._parts
        if sync.shards_whole_leaves and self._layouts.has_auto(layout):
            self._warn(
                f"`sync` keeps shards of the parameters and was given no `param_specs`, and leaves "
                f"are sharded over {sorted(layout.axes)} inside a replica: slow steps gather them "
                "first. Pass `param_specs`, one PartitionSpec per leaf, or shard_state=False."
            )
        return dataclasses.replace(self._parts, sync=sync.with_specs(layout.specs))

    def _placed_batch(self, batch: PyTree, layout: Layout) -> PyTree:
        return placed_batch(batch, self.mesh, self._layouts.data_axes(layout), self.host_batch)

    def _prepared(
        self, state: TrainState, batch: PyTree, weight: Any
    ) -> tuple[Any, tuple[TrainState, PyTree, jax.Array | None]]:
        """The program of the next update, and its arguments where it wants them."""
        self._note_numbers(state).replace(state.opt_state)
        layout = self._layouts.of(state)
        batch = self._placed_batch(batch, layout)
        weight = placed_weight(weight, self.mesh, self.axis_name, self.host_batch)
        phase = self.next_phase(state) if self.mode == "host" else None
        program = self._program(phase, layout, state, batch, weight)
        return program, (state, batch, weight)

    def _program(
        self,
        phase: Phase | None,
        layout: Layout,
        state: TrainState,
        batch: PyTree,
        weight: jax.Array | None,
    ) -> Any:
        """The compiled step of a phase, made at its first use."""
        mesh = self.mesh
        # Where the compiler chooses, it might place the new state unlike the old one, and the next
        # step would compile again. Inside of another program there is no next step.
        is_pinned = bool(layout.axes) and not isinstance(state.step, Tracer)
        key = (phase, layout.axes, layout.key, is_pinned)
        if key not in self._programs:
            self._check_transforms(state)
            if self.sync is not None:
                check_shards(self.sync.shards(state.opt_state[-1]))
            if isinstance(mesh, VirtualMesh) and len(mesh.shape) > 1:
                # vmap cannot tell that inner axes disagree; the types of a device mesh can.
                jax.eval_shape(self._build(phase, layout, _abstract(mesh)), state, batch, weight)
            pinned = jax.tree.map(lambda x: x.sharding, state) if is_pinned else None
            self._programs[key] = self._build(phase, layout, mesh, pinned)
        return self._programs[key]

    def _build(
        self,
        phase: Phase | None,
        layout: Layout,
        mesh: AnyMesh | AbstractMesh,
        state_shardings: PyTree | None = None,
    ) -> Any:
        inner, parts = self._layouts.inner_axes(layout), self._parts_for(layout)
        mapped = map_replicas(
            lambda state, batch, weight: parts.per_replica(state, batch, weight, phase, inner),
            mesh=mesh,
            axis_name=self.axis_name,
            in_roles=("stacked", "batch", "stacked"),
            out_roles=("stacked", "stacked"),
            automatic=layout.axes,
        )
        return jax.jit(
            mapped,
            donate_argnums=(0,) if self._donate else (),
            out_shardings=None if state_shardings is None else (state_shardings, None),
        )


def _counter(state: TrainState, sync: ParameterTransform | None) -> jax.Array:
    return state.step if sync is None else state.opt_state[-1].count


def _abstract(mesh: VirtualMesh) -> AbstractMesh:
    """Axes of the same names and sizes for programs that are lowered but not run."""
    return AbstractMesh(
        tuple(mesh.shape.values()), mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names)
    )
