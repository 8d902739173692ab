"""The training step over all replicas: which program runs, and where its arguments lie."""

from typing import Any

import jax

from ..._support.checks import as_int
from ..._support.types import Phase, PyTree
from ...algorithms import shares_of_gossip
from ...embedding import Ahead, WithTables
from ...mesh import AnyMesh, Shares, VirtualMesh, consensus
from ...tracing import ready_order
from ...transform import phase_name
from ...tree import check_arrays
from .._train_state import TrainState, started, typed_keys
from ..batches import HostBatch, as_arrays
from ._ahead import AheadMode, AheadStep
from ._step_programs import EVALUATE, abstract, update
from ._step_runner import Mode, Runner
from ._step_states import refuse_donated, refuse_others, refuse_untrainable, tells_where_it_lies
from .update import Given, GradientWindow, Metrics, ReplicaStep, StepParts


class TrainStep:
    """A training step: `step(state, batch) -> (state, metrics)`. Made by `make_train_step`.

    Attributes:
      tx: the whole chain, for `TrainState.create`; `init` does that.
      mesh: the mesh it runs on.
      axis_name: the replica axis.
      mode, host_batch: as `make_train_step` was given them.
      sync: the parameter transform, sized for the mesh; None without one. Programs use it
        `with_specs` of the parameters that they are for.
      embeddings: the tables; None without.
    """

    def __init__(
        self, parts: StepParts, mesh: AnyMesh, mode: Mode, host_batch: HostBatch, donate: bool
    ) -> None:
        self._runner = Runner(parts, mesh, mode, host_batch, donate)
        self.mesh, self.axis_name, self.mode = mesh, parts.axis_name, mode
        self.embeddings = self._runner.embeddings
        self.tx = ReplicaStep(parts, Ahead()).chain()
        self.host_batch: HostBatch = host_batch
        self.sync = parts.sync

    def init(
        self, params: PyTree, *, model_state: PyTree | None = None, seed: int = 0
    ) -> TrainState:
        """`TrainState.create` with this step's chain, mesh and axis.

        Dense `params` get new tables, by the seed; `js.WithTables(dense, stored)` has them.
        """
        lies: dict[str, Any] = {"mesh": self.mesh, "axis_name": self.axis_name}
        runner = self._runner
        if runner.parts.raw_keys:
            model_state = typed_keys(model_state)
        lookup = runner.parts.lookup
        if runner.parts.params_form is not None:
            form, has_tables = runner.parts.params_form, isinstance(params, WithTables)
            dense = params.dense if has_tables else params
            check_arrays("`params`", dense)  # both by the names that leaves have here
            refuse_untrainable(dense)
            params = params._replace(dense=form(dense)) if has_tables else form(dense)
        if runner.parts.model_state_form is not None and model_state is not None:
            model_state = runner.parts.model_state_form(model_state)
        stacked = lookup.stacked(params, seed, **lies)
        refuse_untrainable(lookup.dense(stacked))
        state = started(stacked, self.tx, model_state=model_state, seed=seed, **lies)
        runner.note(state, runner.layouts.of(state))
        runner.check(state)
        return state

    def phase(self, t: int) -> Phase:
        """What update t = 1, 2, ... exchanges beside gradients; `()` without a sync."""
        return () if self.sync is None else self.sync.phase(t)

    def next_phase(self, state: TrainState) -> Phase:
        """The phase of the update that `step(state, batch)` will do, known on the host."""
        return self._runner.next_phase(state)

    def shares(self, state: TrainState) -> Shares | None:
        """Return how replicas count in the consensus: `shares=` of `js.consensus`; None: alike.

        It raises `ValueError` for several `js.sgp` in `optimizer`, each over leaves of its own.
        """
        self._runner.refuse(state)
        if self.sync is not None:
            return self.sync.shares(state.opt_state[-1])
        return shares_of_gossip(state.opt_state)

    def consensus(self, state: TrainState, *, whole: bool = True) -> PyTree:
        """Return one exact copy of the parameters: the mean that this step's exchange tends to.

        Gossip weighs its replicas and counts what is in flight; of all else it is the plain mean,
        as of the model state always: `js.consensus(state.model_state, mesh=step.mesh)`. `whole` is
        that of `js.consensus`: parameters of stages come back as the model's own tree.

        Communication: that of `js.consensus`.
        """
        shares = self.shares(state)
        lies: dict[str, Any] = {"mesh": self.mesh, "axis_name": self.axis_name}
        return consensus(state.params, **lies, shares=shares, whole=whole)

    def __call__(
        self,
        state: TrainState,
        batch: PyTree,
        weight: Any = None,
        *,
        window: GradientWindow | None = None,
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
          window: batches whose gradients `collect` has gathered: the update is made of their mean
            with this batch. With weights a replica's mean is weighted with those of its batches,
            and its share in averages over replicas is their sum.

        Returns:
          `(state, metrics)`: metrics are stacked per replica, (replicas,), "loss" among them; with
          a weight that too, and zeros for replicas of weight 0. They are those of this batch, with
          a window too.

        Raises:
          ValueError: a batch that does not split evenly, a weight of another shape, a state of
            another algorithm or whose buffers were donated; in host mode a call inside of jax.jit;
            a window of other parameters, or where not all batches have a weight; with a window, a
            line search; ids in no table (`refuse_ids`). On all processes: batches that do not fit
            together.

        Communication: the transforms'. In several processes, for batches of the host: none, but for
          a note of some bytes to the coordinator, and one back, at the first batch of a shape.
        """
        return self._runner.update(state, self._runner.given(state, batch, weight, window))[:2]

    def collect(
        self,
        state: TrainState,
        batch: PyTree,
        weight: Any = None,
        window: GradientWindow | None = None,
        *,
        num_batches: int = 0,
    ) -> tuple[GradientWindow, Metrics]:
        """Gradients of one batch, for an update that is made of several.

            window, metrics = step.collect(state, first)
            window, metrics = step.collect(state, second, window=window)
            state, metrics = step(state, third, window=window)

        The state stays as it is: no update is counted and nothing is exchanged between replicas.
        Model state goes on from batch to batch in the window, and every batch has another key.

        Args:
          state: as `step` takes it; nothing of it is donated.
          batch: as `step` takes it. Without weights each batch of a window counts alike, whatever
            its size.
          weight: as `step` takes it; for all batches of a window or for none.
          window: what the batches before gave; None begins another. It is donated where the step
            donates.
          num_batches: how many batches a window that begins here will hold, all of one shape. With
            tables their rows then have room from the start, and one program adds each batch; a
            batch for which there is no room makes the window larger, by a program of its own.

        Returns:
          `(window, metrics)`: metrics are those of this batch, as `step` returns them.

        Raises:
          ValueError: as `step`; `num_batches` that is no integer >= 0.

        Communication: between replicas none; with `model_state="broadcast"` its bytes at the first
          batch of a window. Over inner axes one all-reduce of the metrics: gradients and model
          state are reduced once, in the update.
        """
        given = self._runner.given(state, batch, weight, window)
        if as_int(num_batches, 0) is None:
            raise ValueError(
                f"`num_batches` counts batches of a window and must be >= 0, got {num_batches!r}."
            )
        return self._runner.collect(state, given, int(num_batches))[:2]

    def apply(self, state: TrainState, window: GradientWindow) -> tuple[TrainState, Metrics]:
        """One update of the mean of the batches in a window, without another batch.

        Args:
          state: the one that they were collected with; donated where the step donates.
          window: of at least one batch, collected by this step.

        Returns:
          `(state, metrics)`: metrics are means over the batches of the window.

        Raises:
          ValueError: as `step`; a step that has collected nothing.

        Communication: that of one update.
        """
        return self._runner.apply(state, window)[:2]

    def refuse_ids(self, num_running: int = 0) -> None:
        """Raise `ValueError` where a batch that has run had ids that are in no table; wait for it.

        Ids that only devices know are counted, their update is skipped as by a loss scale, and the
        second call after it raises. Call this at the end of a loop, as `js.TrainPipeline` and
        `js.train_loop` do. It tells of the replicas of this process.

        Args:
          num_running: how many of the last calls are not asked and not waited for.
        """
        self._runner.placing.refuse_counted(num_running)

    def place(
        self,
        batch: PyTree,
        weight: Any = None,
        *,
        state: TrainState | None = None,
        check_ids: bool = True,
    ) -> tuple[PyTree, Any]:
        """A batch and its weight on the devices, as a call would place them; nothing waits.

        The call that is given them copies nothing: `js.TrainPipeline` copies a batch while another
        is used. What lies there already stays as it is.

        Args:
          batch: as a call takes it.
          weight: likewise.
          state: one as the batch is for, which tells over which axes parameters are sharded, and
            batches so are not. None: the last that this step has seen.
          check_ids: False where ids are made of the batch before the call: none are looked at.

        Returns:
          `(batch, weight)`, arrays on the devices; weight None stays None.

        Raises:
          ValueError: as a call of batches and weights that do not fit.

        Communication: host to device; between processes as a call, instead of it.
        """
        if state is not None:
            refuse_others(state)
        return self._runner.place(state, batch, weight, check_ids=check_ids)

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
        refuse_others(state)
        refuse_donated(state)
        layout = self._runner.layouts.of(state)
        given = Given(*self.place(batch, weight, state=state))
        state = state._replace(opt_state=())  # at which an evaluation does not look
        self._runner.placing.refuse_counted()
        metrics = self._runner.run(EVALUATE, layout, state, given)
        self._runner.ran(given, metrics)
        return metrics

    def compiled(
        self,
        state: TrainState,
        batch: PyTree,
        weight: Any = None,
        *,
        window: GradientWindow | None = None,
    ) -> jax.stages.Compiled:
        """What `step(state, batch, weight)` runs, compiled now if it was not; nothing runs.

        The batch is as `step` takes it. Shapes without values (`ShapeDtypeStruct`) are of the whole
        batch, here and wherever nothing runs; processes are not compared.
        """
        return self._runner.compiled(state, Given(batch, weight, window))

    def ahead(self, mode: AheadMode, num_exact: int = 0, *, room: float = 0.25) -> AheadStep:
        """This step with the next batch's tables asked beside it; see `AheadStep`."""
        return AheadStep(self._runner, mode, num_exact, room)

    def ready_order(self, state: TrainState, batch: PyTree) -> tuple[int, ...] | None:
        """`js.ready_order` of what one device computes.

        None for a loss function that uses a mapped axis, or is computed outside of programs;
        nothing runs.
        """
        runner = self._runner
        if runner.parts.differentiation.dispatched is not None:
            return None
        share = runner.placing.share(as_arrays(batch), runner.layouts.of(state))
        params, model_state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (state.params, state.model_state)
        )
        try:
            params, batch = runner.parts.lookup.seen_by_loss(params, share)
            loss = runner.parts.differentiation.loss
            return ready_order(loss, params, batch, model_state=model_state)
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
        runner = self._runner
        runner.check(state)
        layout = runner.layouts.of(state)
        mesh = abstract(self.mesh) if isinstance(self.mesh, VirtualMesh) else self.mesh
        given = Given(*runner.placing.placed(batch, None, layout))

        def trace(phase: Phase | None) -> jax.stages.Traced:
            # Those that will run also depend on the placement of the state where the compiler
            # chooses it, and shapes alone need not tell.
            task = update(phase, windowed=False)
            if mesh is not self.mesh or (layout.axes and not tells_where_it_lies(state)):
                program = runner.programs.build(task, layout, mesh)
            else:
                program = runner.program(task, layout, state, given)
            ready = runner.dispatched(task, layout, state, given, runs=False)
            return program.trace(state=state, **ready._asdict())

        if self.mode == "traced":
            return {None: trace(None)}
        if self.sync is None:
            return {"every": trace(())}
        return {phase_name(p): trace(p) for p in self.sync.phases()}
