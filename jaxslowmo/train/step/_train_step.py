"""The training step over all replicas: its interface, how it is made, its compiler's options."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
import optax

from ..._support.checks import check_choice, checked_int, checks_flags
from ..._support.types import AxisName, CompilerOptions, Phase, PyTree
from ...algorithms import shares_of_gossip
from ...embedding import Embeddings, WithTables, tables_for_mesh
from ...gradients.precision import Policy, apply_policy
from ...mesh import (
    AnyMesh,
    MapWith,
    Shares,
    consensus,
    describe,
    device_mesh,
    mesh_text,
    replica_count,
    replicate,
    replicate_argument,
)
from ...tracing import LossProgram, as_full_loss, state_types
from ...transform import ParameterTransform, over_stages, spec_of
from ...tree import check_arrays
from .._batches import HostBatch
from .._train_state import StepExchange, TrainState, replica_keys, warn_of_rbg, with_own_keys
from ._ahead import AheadMode, AheadStep
from ._checks import (
    check_axes,
    check_exchanges,
    check_trainable,
    check_with_tables,
    checked_gradients,
    split_chain,
)
from ._dispatched import DispatchedGradients
from ._first_run import compare_settings
from ._gradients import BatchGradients, GradientWindow, Metrics, ModelStateMode, StepInputs
from ._programs import Mode
from ._runner import Runner
from ._update import Update
from ._with_tables import UpdateWithTables


class TrainStep:
    """A training step: `step(state, batch) -> (state, metrics)`. Made by `make_train_step`.

    Attributes:
      mesh: the mesh it runs on.
      axis_name: the replica axis.
      mode, host_batch: the arguments of `make_train_step`.
      sync: the parameter transform, sized for the mesh; None without one. Each program uses it
        `with_specs` of its parameters.
      embeddings: the tables; None without tables.
    """

    def __init__(self, runner: Runner, host_batch: HostBatch, settings: Mapping[str, Any]) -> None:
        self._runner, self._settings = runner, settings
        self.mesh, self.axis_name, self.mode = runner.mesh, runner.update.axis_name, runner.mode
        self.embeddings = runner.embeddings
        self.sync = runner.update.sync
        self.host_batch: HostBatch = host_batch

    def __repr__(self) -> str:
        """Return a line: the axes of the mesh, what is exchanged, and the mode."""
        gradients = self._runner.update.gradients
        parts = [] if gradients is None else [f"gradients={gradients!r}"]
        parts += [] if self.sync is None else [f"sync={self.sync!r}"]
        if not parts:
            parts = ['sync="none"' if self._runner.update.independent else "exchanges in optimizer"]
        where = mesh_text(self.mesh)
        return f"<js.make_train_step over {where}: {', '.join(parts)}; mode={self.mode!r}>"

    def init(
        self,
        params: PyTree,
        *,
        opt_state: PyTree | None = None,
        model_state: PyTree | None = None,
        seed: int = 0,
    ) -> TrainState:
        """Make a state: all replicas start from one copy of the parameters.

        For dense `params` new tables are drawn by `seed`; `js.embedding.WithTables(dense, stored)`
        brings its own. On all processes `ValueError` names settings of the step in which they
        differ.
        """
        placement: dict[str, Any] = {"mesh": self.mesh, "axis_name": self.axis_name}
        compare_settings({"seed": seed, **self._settings})
        update = self._runner.update
        has_tables = isinstance(params, WithTables)
        dense = params.dense if has_tables else params
        # Both checks come before the forms, so that errors have the user's names of leaves.
        check_arrays("`params`", dense)
        check_trainable(dense)
        dense = update.loss_program.params_form(dense)
        params = params._replace(dense=dense) if has_tables else dense
        model_state = update.loss_program.model_state_form(
            {} if model_state is None else model_state
        )
        stacked = update.replicate_params(params, seed, self.mesh)
        if jax.process_count() > 1:
            types = state_types(update.optimizer, update.dense(stacked), **placement)
            compare_settings({"optimizer.init(params)": describe(types)})
        gradients, optimizer = update.init_optimizers(stacked, self.mesh)
        if opt_state is not None:
            one = jax.tree.structure(jax.tree.map(lambda x: 0, optimizer))
            if jax.tree.structure(opt_state) != one:
                raise ValueError(
                    f"init: `opt_state` must be that of one copy of the parameters, {one}, got "
                    f"{jax.tree.structure(opt_state)}."
                )
            optimizer = replicate_argument("opt_state", opt_state, **placement)
        warn_of_rbg(model_state, self.mesh)
        states = replicate_argument("model_state", model_state, **placement)
        state = TrainState(
            step=replicate(jax.device_put(np.int32(0)), **placement),
            params=stacked,
            opt_state=optimizer,
            model_state=with_own_keys("model_state", states, **placement),
            rng=replica_keys(seed, self.mesh, self.axis_name),
            exchange=StepExchange(*update.init_exchange(stacked, self.mesh), gradients),
        )
        return self._runner.accept_initial_state(state)

    def placed(self, state: TrainState) -> TrainState:
        """Return a state where this step's states lie; types of arrays get their shardings.

        The first state of a step says where its states lie, and where its leaves have no place, it
        is that of the parameters; so types of a state, and a described mesh, show what a program
        would take. A later state that lies elsewhere is moved, with a warning.

        Communication: what is needed to move arrays.
        """
        return self._runner.accept_state(state, is_executed=False)

    def phase(self, t: int) -> Phase:
        """Return the phase of update t = 1, 2, ...: the exchanges of `sync`; `()` without one."""
        return self._runner.phases.at_update(t)

    def next_phase(self, state: TrainState, later: int = 0) -> Phase:
        """Return the phase of the update that `step(state, batch)` does, as a host value.

        With `later` it is that of an update so many updates after it.
        """
        return self._runner.phases.next(self._runner.accept_state(state), later)

    def shares(self, state: TrainState) -> Shares | None:
        """Return the replicas' weights in the consensus, `shares=` of `js.consensus`; None: equal.

        Raise `ValueError` for several `js.sgp` in `optimizer`, each over leaves of its own.
        """
        state = self._runner.accept_state(state)
        if self.sync is not None:
            return self.sync.shares(state.exchange)
        return shares_of_gossip(state.opt_state)

    def consensus(self, state: TrainState, *, whole: bool = True) -> PyTree:
        """Return one exact copy of the parameters: the mean to which this step's exchange tends.

        Gossip weights its replicas and counts parameters in flight; for all others it is the plain
        mean. For model state it always is: `js.consensus(state.model_state, mesh=step.mesh)`.
        `whole` is that of `js.consensus`: parameters of stages are returned as the model's tree.

        Communication: that of `js.consensus`.
        """
        shares = self.shares(state)
        placement: dict[str, Any] = {"mesh": self.mesh, "axis_name": self.axis_name}
        return consensus(state.params, **placement, shares=shares, whole=whole)

    def __call__(
        self,
        state: TrainState,
        batch: PyTree,
        weight: Any = None,
        *,
        window: GradientWindow | None = None,
    ) -> tuple[TrainState, Metrics]:
        """Run one update on every replica.

        Args:
          state: a `TrainState`; its buffers are donated if the step was made with `donate`.
          batch: leaves with leading dimension replicas * local batch, replica-major. Leaves without
            a dimension, or with a leading dimension of 1 where others have more, are shared by all
            examples. With several processes arrays of a process hold what `host_batch` says; an
            array over all processes is the whole batch.
          weight: (replicas,) each replica's weight in averages, >= 0, such as its number of
            samples; 0 for one that has run out. None: all equal. With `host_batch="local"` in
            several processes it has one number for each replica of which this process has devices.
          window: gradients of batches from `collect`: the update uses their mean with this batch,
            weighted with the batches' weights.

        Returns:
          `(state, metrics)`: metrics of this batch, stacked per replica, (replicas,), with "loss";
          with a weight also "weight", and zeros for replicas of weight 0.

        Raises:
          ValueError: a batch that does not split evenly, a weight of another shape, a state of
            another algorithm or whose buffers were donated; in host mode a call inside of jax.jit;
            a window of other parameters, or batches of which only some have a weight; with a
            window, a line search; ids in no table (`refuse_ids`). On all processes: batches that do
            not fit together, or programs that differ, named before the first run of each.

        Communication: the transforms'. With several processes also a note of some bytes to the
          coordinator, and one back, at the first host batch of a shape and the first run of a
          program.
        """
        state, inputs = self._runner.checked_inputs(state, batch, weight, window)
        return self._runner.run_update(state, inputs)[:2]

    def scan(
        self, state: TrainState, batches: PyTree, weight: Any = None
    ) -> tuple[TrainState, Metrics]:
        """Run an update for each of K batches in one program; with `mode="host"` in one per phase.

        The results are those of K calls, and the host does the work of one.

        Args:
          state: as in a call.
          batches: a batch as in a call, with a first dimension of K on every leaf.
          weight: as in a call, for all updates.

        Returns:
          `(state, metrics)`: those of each update, with a first dimension of K.

        Raises:
          ValueError: the errors of a call; batches of different numbers of updates; a step with
            `embeddings`, or whose loss is computed outside of programs.

        Communication: that of K calls.
        """
        return self._runner.scan(state, batches, weight)

    def collect(
        self,
        state: TrainState,
        batch: PyTree,
        weight: Any = None,
        window: GradientWindow | None = None,
        *,
        num_batches: int = 0,
    ) -> tuple[GradientWindow, Metrics]:
        """Add the gradients of one batch to a window, for an update of several batches.

            window, metrics = step.collect(state, first)
            window, metrics = step.collect(state, second, window=window)
            state, metrics = step(state, third, window=window)

        The state does not change: no update is counted and nothing is exchanged between replicas.
        The window passes model state from batch to batch, and every batch has another key.

        Args:
          state: the state of the next update; it is not donated.
          batch: a batch as in a call. Without weights each batch of a window counts equally,
            whatever its size.
          weight: weight as in a call; pass it for all batches of a window or for none.
          window: the window of the batches before; None begins one. It is donated if the step
            donates.
          num_batches: number of batches, all of one shape, that a window that begins here will
            hold. With tables, it then has room for their rows, and one program adds each batch.

        Returns:
          `(window, metrics)`: the metrics of this batch, as a call returns them.

        Raises:
          ValueError: the errors of a call; `num_batches` that is no integer >= 0.

        Communication: between replicas none; with `model_state="broadcast"` its bytes at the first
          batch of a window. Over inner axes one all-reduce of the metrics: gradients and model
          state are reduced once, in the update.
        """
        state, inputs = self._runner.checked_inputs(state, batch, weight, window)
        num_batches = checked_int("`num_batches` counts batches of a window and", num_batches, 0)
        return self._runner.collect(state, inputs, num_batches)[:2]

    def apply(self, state: TrainState, window: GradientWindow) -> tuple[TrainState, Metrics]:
        """Run one update with the mean of the batches in a window, without another batch.

        Args:
          state: the state with which they were collected; donated if the step donates.
          window: a window of at least one batch, collected by this step.

        Returns:
          `(state, metrics)`: metrics are means over the batches of the window.

        Raises:
          ValueError: the errors of a call; the step has collected nothing.

        Communication: that of one update.
        """
        return self._runner.apply(state, window)

    def refuse_ids(self, num_running: int = 0) -> None:
        """Wait for the batches so far; raise `ValueError` if one had ids that are in no table.

        Such ids of batches made on devices are counted there; their update is skipped as by a loss
        scale, and the second call after it raises. Call this at the end of a loop, as
        `js.TrainPipeline` and `js.train_loop` do. It checks the replicas of this process.

        Args:
          num_running: number of the last calls that are left out: neither checked nor waited for.
        """
        self._runner.placer.check_counts(num_running)

    def place(
        self,
        batch: PyTree,
        weight: Any = None,
        *,
        state: TrainState | None = None,
        check_ids: bool = True,
    ) -> tuple[PyTree, Any]:
        """Place a batch and its weight on the devices, as a call would; do not wait for the copy.

        A call with the results copies nothing, so `js.TrainPipeline` can copy a batch while another
        is used. Arrays that are placed already stay unchanged.

        Args:
          batch: a batch as in a call.
          weight: its weight as in a call.
          state: a state like that of the call. Its parameters' layout decides over which axes a
            batch is split. None uses the layout of the last state of this step.
          check_ids: whether to check ids; False if you make ids from the placed batch later.

        Returns:
          `(batch, weight)`, arrays on the devices; weight None stays None.

        Raises:
          ValueError: the errors of a call for batches and weights that do not fit.

        Communication: host to device; between processes that of a call, which then has none.
        """
        if state is not None:
            self._runner.accept_state(state, needs_opt_state=False, is_executed=False)
        return self._runner.place(batch, weight, check_ids=check_ids)

    def evaluate(self, state: TrainState, batch: PyTree, weight: Any = None) -> Metrics:
        """Return the metrics of a batch by a forward pass; each replica uses its own parameters.

        Nothing is updated, counted or donated. The loss function is called as in training, with
        the key of the next update, and the model state that it returns is dropped.

        Args:
          state: a `TrainState`.
          batch: a batch as in a call, of any size that splits evenly.
          weight: its weight as in a call; metrics of replicas of weight 0 are zeros.

        Returns:
          Metrics stacked per replica, (replicas,), with "loss"; with a weight also "weight".

        Raises:
          ValueError: the errors of a call.

        Communication: over inner axes one all-reduce of the metrics; with
          `model_state="broadcast"` one of the model state over the replicas.
        """
        return self._runner.evaluate(state, batch, weight)

    def lower(
        self,
        state: TrainState,
        batch: PyTree,
        weight: Any = None,
        *,
        window: GradientWindow | None = None,
    ) -> jax.stages.Lowered:
        """Return the lowered program of `step(state, batch, weight)`.

        Nothing runs, and processes are not compared. The batch is as in a call; a batch of shapes
        without values (`ShapeDtypeStruct`) is the whole batch, as in all methods that run nothing.
        """
        return self._runner.lower(state, StepInputs(batch, weight, window))

    def compiled(self, *args: Any, **options: Any) -> jax.stages.Compiled:
        """Return the compiled program of `lower`, compiling it if needed; nothing runs."""
        return self.lower(*args, **options).compile()

    def ahead(self, mode: AheadMode, num_exact: int = 0, *, room: float = 0.25) -> AheadStep:
        """Return this step with table lookups for the next batch in it; see `AheadStep`."""
        return AheadStep(self._runner, mode, num_exact, room)

    def ready_order(self, state: TrainState, batch: PyTree) -> tuple[int, ...] | None:
        """Return `js.gradients.ready_order` of one device's computation; nothing runs.

        It is None for a loss function that uses a mapped axis, or is computed outside of programs.
        """
        return self._runner.ready_order(state, batch)

    def traced_by_phase(
        self, state: TrainState, batch: PyTree
    ) -> dict[str | None, jax.stages.Traced]:
        """Trace the step's programs: by phase name when host-scheduled, else one under None.

        On a `VirtualMesh` they are traced for as many devices as it has replicas, which shows what
        would be sent. Arguments may be `ShapeDtypeStruct`s; nothing runs. On a `Mesh` the step's
        own programs are traced, so its first updates need not trace them again. A batch of arrays
        is as in a call, one of shapes is the whole batch, also with several processes.
        """
        return self._runner.phases.trace_by_phase(
            lambda phase: self._runner.trace_update(state, batch, phase)
        )


@checks_flags("make_train_step")
def make_train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    sync: ParameterTransform | Literal["none"] | None = None,
    gradients: optax.GradientTransformation | None = None,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
    mode: Mode = "traced",
    accumulate: int = 1,
    model_state: ModelStateMode = "sync_mean",
    host_batch: HostBatch = "local",
    donate: bool = True,
    embeddings: Embeddings | None = None,
    policy: Policy | None = None,
    compiler_options: Mapping[str, str | int | float | bool] | None = None,
    map_with: MapWith = "shard_map",
) -> TrainStep:
    """Build a data-parallel training step over replicas.

    More on each argument: [docs/api/train.md](#details).

    Args:
      loss_fn: `loss_fn(params, batch, *, rng, model_state) -> (loss, (metrics, model_state))` for
        the examples of one replica; without model state also `loss` or `(loss, metrics)`.
      optimizer: an optax transform, whose state is local to each replica, or a whole `js.chain`.
      sync: the exchange of parameters, such as `js.slowmo("replica")`. None: there is none, since
        gradients are averaged. `"none"`: replicas exchange nothing at all.
      gradients: the reduction of gradients, such as `js.all_reduce_gradients("replica")`; None
        averages them inside a replica only.
      mesh: `js.make_mesh({"replica": R})` or `js.virtual_mesh`. Of inner axes that `gradients` or
        a `local_axis_name` names a loss sees the examples of one device; others are the compiler's.
      axis_name: the mesh axis of the replicas, or several.
      mode: `"traced"`: one program decides which exchanges are due. `"host"`: one program per
        phase; the host chooses, so local steps have no collective over `axis_name`.
      accumulate: microbatches per update, >= 1; gradients are averaged first, then exchanged once.
      model_state: `"sync_mean"` averages it when parameters are exchanged (without `sync` in every
        update), `"broadcast"` uses that of replica 0, `"local"` never exchanges it.
      host_batch: what a host batch holds with several processes: `"local"`, the part of this
        process, or `"global"`, the whole batch.
      donate: whether to reuse the state's buffers for the new state.
      embeddings: tables made by `js.embeddings`; `loss_fn` also takes `embedded`, their vectors.
      policy: the dtype in which `loss_fn` computes; None keeps those of parameters and batch.
      compiler_options: options of the compiler by name; see `js.recommended_compiler_options`.
      map_with: how the loss is mapped over replicas of several devices: `"vmap"` is for models that
        hold `shard_map`s with a mesh of their own.

    Returns:
      A `TrainStep`: `step(state, batch) -> (state, metrics)`; `step.init(params)` makes the state.

    Raises:
      ValueError: an invalid value, arguments that exclude each other, a transform in the wrong
        place, several replicas and no exchange; also when `init` or the first step is traced.
      UserWarning: once, for settings that are legal and hardly meant.

    Communication: what `gradients` and `sync` state, once per update; one all-reduce of the model
      state's bytes where it is averaged; over inner axes one all-reduce each of metrics and model
      state; at most 12 bytes more for an optimizer that reads the loss, 4 with `embeddings`.
    """
    settings = {
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "gradients": gradients,
        "sync": sync,
        "axis_name": axis_name,
        "mode": mode,
        "accumulate": accumulate,
        "model_state": model_state,
        "embeddings": embeddings,
        "policy": policy,
        "compiler_options": compiler_options,
        "map_with": map_with,
    }
    replica_count("make_train_step", mesh, axis_name)
    check_choice("mode", mode, Mode)
    check_choice("model_state", model_state, ModelStateMode)
    check_choice("host_batch", host_batch, HostBatch)
    check_choice("map_with", map_with, MapWith)
    num_microbatches = checked_int("`accumulate` counts microbatches and", accumulate, 1)
    gradients, optimizer, sync = split_chain(optimizer, gradients, sync)
    independent = isinstance(sync, str) and sync == "none"
    if not independent and sync is not None and not isinstance(sync, ParameterTransform):
        raise ValueError(
            '`sync` must be a js.ParameterTransform such as js.local_sgd(...), None or "none", got '
            f"{sync!r}; other transforms go into `optimizer` or `gradients`."
        )
    if independent and model_state == "broadcast":
        raise ValueError(
            '`sync`="none" lets replicas train independently, and `model_state`="broadcast" gives '
            "all that of replica 0: leave one out."
        )
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(
            f'`policy` must be a js.gradients.Policy, such as Policy("bfloat16"), got {policy!r}.'
        )
    options = checked_compiler_options(compiler_options or {}, mesh)
    exchange = sync if isinstance(sync, ParameterTransform) else None
    check_axes((gradients, optimizer, exchange), mesh, axis_name)
    if embeddings is not None:
        check_with_tables(gradients)
        embeddings = tables_for_mesh(embeddings, mesh, axis_name)
    loss_program = LossProgram.from_loss_fn(loss_fn)
    loss_program.check_mesh(mesh)
    if map_with == "vmap":
        what = "`embeddings`" if embeddings is not None else None
        what = '`model_state`="broadcast"' if model_state == "broadcast" else what
        what = "a pipelined `loss_fn`" if loss_program.param_types is not None else what
        if what is not None:
            raise ValueError(
                f'`map_with`="vmap" maps the loss, in which {what} communicates: use "shard_map".'
            )
    loss = as_full_loss(loss_program.quotient_loss or loss_fn)
    optimizer = over_stages(loss_program.tied_transform(optimizer))
    if loss_program.param_types is not None:  # refuses at once what takes leaves of several stages
        jax.eval_shape(optimizer.init, loss_program.param_types)
    if gradients is not None and spec_of(gradients).clips:
        gradients = loss_program.tied_transform(gradients)
    differentiation: dict[str, Any] = {
        "axis_name": axis_name,
        "model_state_mode": "local" if independent else model_state,
        "unscales": "unscaled" in spec_of(optimizer).takes,
    }
    if loss_program.dispatch is not None:
        differentiated_loss = DispatchedGradients.from_loss(
            loss_program.dispatch, loss, policy, num_microbatches, **differentiation
        )
    else:
        if policy is not None:
            loss = apply_policy(policy, loss)
        differentiated_loss = BatchGradients(
            loss=loss, accumulate=num_microbatches, **differentiation
        )
    update = Update(
        differentiated_loss=differentiated_loss,
        gradients=None if gradients is None else checked_gradients(gradients),
        optimizer=optimizer,
        sync=None if exchange is None else exchange.bound(dict(mesh.shape)),
        axis_name=axis_name,
        loss_program=loss_program,
        independent=independent,
        policy=policy,
        map_with=map_with,
    )
    if embeddings is not None:
        update = UpdateWithTables.from_dense_update(update, embeddings)
    check_exchanges(update, mesh)
    runner = Runner(update, embeddings, mesh, mode, host_batch, donate, options)
    return TrainStep(runner, host_batch, settings)


# Options of the compiler.

# What the names of one platform's options begin with. Some of these names are known to the
# compilers of all platforms, which then do nothing with them.
_PLATFORMS = {
    "xla_cpu_": "cpu",
    "xla_gpu_": "gpu",
    "xla_tpu_": "tpu",
    "xla_jf_": "tpu",
    "xla_vf_": "tpu",
    "xla_gf_": "tpu",
    "xla_msa_": "tpu",
}

_GPU: dict[str, str | int | float | bool] = {"xla_gpu_enable_latency_hiding_scheduler": True}
# With one axis it would help nothing, and leaves fewer buckets of gradients beside products.
_GPU_LEVELS = {**_GPU, "xla_gpu_experimental_parallel_collective_overlap_limit": 2}
_V5E: dict[str, str | int | float | bool] = {"xla_max_concurrent_async_collective_permutes": 16}
_V5P = {**_V5E, "xla_tpu_enable_all_experimental_scheduler_features": True}
# By the names that devices give themselves, which changed between versions of libtpu.
_TPU = {
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V5P,
    "TPU v6e": _V5P,
}


def recommended_compiler_options(mesh: AnyMesh) -> dict[str, str | int | float | bool]:
    """Return the compiler options that let exchanges overlap on the devices of a mesh.

    Nothing sets them unasked: pass them, alone or with others, to a step, or to `jax.jit` in your
    own loop.

        options = js.recommended_compiler_options(mesh)
        step = js.make_train_step(loss_fn, optimizer, mesh=mesh, compiler_options=options)

    Each option is here because compiled programs show its effect; no time was measured.

    - GPU, on a mesh with several axes that are larger than 1,
      `xla_gpu_experimental_parallel_collective_overlap_limit=2`: two collectives may run at the
      same time. By default one does, so with two levels the exchange of `js.sgp(overlap=1)` waits
      for the all-reduce of the gradients inside a replica, and few products or none hide it. A
      step without `js.sgp` does not need it: there buckets and gathers run beside each other, and
      fewer of them beside products.
    - GPU, `xla_gpu_enable_latency_hiding_scheduler=True`: the default on H100, where it changes
      nothing. On A100 neither gossip nor the buckets of `js.all_reduce_gradients` run beside the
      products of the backward pass without it.
    - TPU v5e, v5p and v6e, `xla_max_concurrent_async_collective_permutes=16`: by default five
      permutes are in flight, so gossip with more peers waits for the others. Programs with fewer
      stay the same.
    - TPU v5p and v6e, `xla_tpu_enable_all_experimental_scheduler_features=True`: without it
      `js.sgp(overlap=1)` ends before or among the products of a step, and not after them.

    Args:
      mesh: the mesh of the step, whose first device decides. The devices may be described ones,
        of `jax.experimental.topologies`.

    Returns:
      Values by name; {} for CPUs, and for TPUs of other kinds.

    Communication: none.
    """
    device = _device_of(mesh)
    has_levels = sum(size > 1 for size in mesh.shape.values()) > 1
    if device.platform == "gpu":
        return dict(_GPU_LEVELS if has_levels else _GPU)
    return dict(_TPU.get(device.device_kind, {}))


def checked_compiler_options(
    options: Mapping[str, str | int | float | bool], mesh: AnyMesh
) -> CompilerOptions:
    """Return the argument `compiler_options` of a step; raise `ValueError` for other platforms."""
    platform = _device_of(mesh).platform
    for name in options:
        prefix = next(filter(name.startswith, _PLATFORMS), None)
        if prefix is not None and platform != _PLATFORMS[prefix]:
            raise ValueError(
                f"`compiler_options`: {name!r} is for {_PLATFORMS[prefix].upper()}s, and `mesh` "
                f"has {platform.upper()}s, whose compiler may ignore it: leave it out."
            )
    return tuple(options.items())


def _device_of(mesh: AnyMesh) -> Any:
    """Return a device on which the programs of a mesh run."""
    return device_mesh(mesh).devices.flat[0]
