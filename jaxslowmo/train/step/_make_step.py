"""Build a training step from a loss function, an optimizer and what to exchange."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import optax

from ..._support.checks import as_int, check_choice
from ..._support.types import AxisName, PyTree
from ...embedding import Embeddings, lookup_of
from ...gradients.precision import Policy, computing_in
from ...mesh import AnyMesh, replica_count
from ...tracing import FullLoss, as_full_loss
from ...transform import LossProgram, ParameterTransform, over_stages, spec_of
from .._batches import HostBatch
from ._compiler_options import checked_compiler_options
from ._gradients import BatchGradients, ModelStateMode, WithResults
from ._runner import Mode, Runner
from ._train_step import TrainStep
from ._transforms import check_axes, check_with_tables, checked_gradients, split_chain
from ._update import Update
from ._with_tables import UpdateWithTables


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
) -> TrainStep:
    """Build a data-parallel training step over replicas.

    Args:
      loss_fn: `loss_fn(params, batch, *, rng, model_state) -> (loss, (metrics, model_state))` for
        the examples of one device. Also allowed: `(params, batch) -> loss` or `(loss, metrics)`,
        with an argument `rng` if needed. metrics is a dict, which may hold dicts, of numbers of any
        dtype and shape under names other than "loss" and "weight"; half precision and booleans
        become float32, as means of integers over devices or microbatches do. The loss has a real
        floating dtype, float32 for a Python float. It may average itself over axes of the mesh, as
        under `jax.pmap`. It may be a pair `(sum, weight)`, such as over tokens and their number:
        then loss and gradients are those of the quotient over all microbatches, batches of a
        window, devices of a replica and, where gradients are averaged, replicas; the metrics have
        `loss_weight`. Local updates use the replica's own quotient.
      optimizer: any optax transform; its state stays local to each replica. A `js.chain` is split:
        everything up to the last transform that reduces gradients, with this library's clipping
        right after it, becomes `gradients`; a parameter transform at its end becomes `sync`; the
        rest is the optimizer. An `optax.chain` of them is called as in your own loop; arguments
        that need its parts raise an error that names it. The optimizer's update receives `value`,
        the loss, averaged in at least float32 over the replicas with their weights whenever
        gradients are; `grad`, its input gradients; and, if gradients are not averaged at all,
        `value_fn`, the replica's own loss on its batch (for line searches).
        Copies of the parameters in its state change with what `sync` changes; see
        `js.remembers_parameters`.
      sync: a parameter transform over `axis_name` (`js.local_sgd`, `js.sgp`, `js.slowmo`, ...), or
        None if gradients are averaged over the replicas. Several replicas with neither, here, in
        `gradients` or in a `js.chain` as `optimizer`, are an error; `"none"` allows it: replicas
        then train independently, and exchange no model state either.
      gradients: a gradient transform; `js.all_reduce_gradients(axis_name)` for plain data
        parallelism. With None, or one that reduces over no axis (`js.clip_by_global_norm`), the
        step first averages gradients over the inner axes of the mesh, if there are any. Wrap your
        own transform with collectives over replicas as `js.gradient_transform(tx)`.
      mesh: `js.make_mesh({"replica": R})`, with inner axes such as `"device"` that share a
        replica's batch, or `js.virtual_mesh`. Axes over which parameters are sharded are left to
        the compiler.
      axis_name: the replica axis.
      mode: `"traced"` decides inside one program which exchanges are due; `"host"` compiles one
        program per phase and chooses on the host, so that local steps hold no collective over
        `axis_name`.
      accumulate: microbatches per update; gradients are averaged locally, then exchanged once.
      model_state: `"sync_mean"` averages model state over replicas in updates that synchronise
        parameters (in all without `sync`), `"broadcast"` uses that of replica 0 in every forward
        pass, `"local"` never exchanges it. Over inner axes it is always averaged. Typed PRNG keys
        in it (nnx.Dropout) are never exchanged, and differ on all devices in the forward pass;
        `js.typed_keys(loss_fn)` makes them of raw ones (Keras, `jax.random.PRNGKey`).
      host_batch: what a host batch and its weight hold with several processes: `"local"`, the part
        of this process, the rows for its own devices in their order along the axes over which
        the batch is split; or `"global"`, the whole batch, the same on every process, which takes
        its part. Neither sends data. Processes whose devices hold the same part, such as those of a
        model axis over processes, must pass equal data. With one process the two are the same.
      donate: whether to reuse the state's buffers for the new state.
      embeddings: tables made by `js.embeddings`; each step updates the rows that it has used.
        `loss_fn` then takes `embedded`, a dict by feature of the vectors looked up for the examples
        of one device; `params` are the dense parameters; the state has
        `js.WithTables(dense, tables)`. Tables have no dense gradient and no part in `optimizer`,
        which therefore must not average, clip or collect gradients, nor exchange parameters.
        Gradients of rows pass through `gradients` as dense ones do: `js.all_reduce_gradients`,
        `js.post_local_gradients`, `js.clip_by_global_norm`, a `js.chain` of these,
        `optax.identity()` or None. `sync` exchanges tables as it does other leaves. The batch is
        also split over the tables' axis, and dense gradients are averaged over it.
      policy: the dtype in which the loss function computes, if it is not that of the parameters;
        None keeps the dtypes of parameters and batch. With `js.Policy("float16")` put
        `js.dynamic_loss_scale` around `optimizer`: gradients are then taken of the loss times its
        scale, and divided by it at once; metrics are of the loss itself, and include `loss_scale`
        and `skipped_updates`.
      compiler_options: options, value by name, for the compiler of every program of this step: its
        updates, `collect`, `evaluate`, `ahead`, those of a pipeline with `executor="host"`, and so
        those that `compiled`, `js.comm_report` and `js.measured` read. Making a state and
        averaging it are other programs. `js.recommended_compiler_options(mesh)` has those known to
        help; with None or {} the compiler's defaults hold. Every process must pass the same.

    Returns:
      A `TrainStep`: `step(state, batch) -> (state, metrics)`; `step.init(params)` makes the state.

    Raises:
      ValueError: unknown axis, mode, model_state or host_batch; accumulate < 1; `sync` that
        is neither a `ParameterTransform` nor `"none"`, or `"none"` with `model_state="broadcast"`;
        a parameter transform as `gradients`; `gradients` with a `js.chain` that reduces, `sync`
        with one that exchanges, several parameter transforms in it; with `embeddings`, `gradients`
        that rows cannot pass through; `compiler_options` that are no mapping of names to str, int,
        float or bool, or are for another platform than that of `mesh` (for a virtual one, of the
        default device); for a pipeline, an `optimizer` whose result for a leaf depends on leaves of
        other stages, or is not proved not to. At `init` or the first step: undeclared collectives
        over replicas in a transform; a parameter transform inside `gradients`, or hidden in
        `optimizer` if host-scheduled or if model state follows it; replicas that would train
        independently; with `embeddings`, on any number of replicas, an `optimizer` that averages
        gradients, exchanges parameters, or holds `js.clip_by_global_norm`, `optax.apply_if_finite`,
        `optax.MultiSteps` or `js.accumulate`; `optax.apply_if_finite` around a transform that
        exchanges. At trace time:
        batches that do not split evenly, a loss that is not floating, gradients not averaged over
        the inner axes, a line search with averaged gradients,
        `js.slowmo(learning_rate="optimizer")` without exactly one learning rate in the state of
        `optimizer`.
      UserWarning: once, for `optax.contrib.sam` or `optax.MultiSteps` where `sync` also exchanges
        between their updates, whatever their period is, and for `js.Policy("float16")` without a
        `js.dynamic_loss_scale` in `optimizer`.

    Communication: what `gradients` and `sync` state, once per update whatever `accumulate`; model
      state as above (one all-reduce of its bytes); over inner axes one all-reduce each of metrics
      and model state; if the optimizer uses an averaged `value`, one of 4 bytes (12 with a weight);
      with `embeddings` and `gradients`, one of 4 bytes, so that all replicas skip an update with
      ids that are in no table.
    """
    settings = {
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
    }
    replica_count("make_train_step", mesh, axis_name)
    choices = {
        "mode": (mode, Mode),
        "model_state": (model_state, ModelStateMode),
        "host_batch": (host_batch, HostBatch),
    }
    for argument, (value, kind) in choices.items():
        check_choice(argument, value, kind)
    num_microbatches = as_int(accumulate, 1)
    if num_microbatches is None:
        raise ValueError(f"`accumulate` counts microbatches and must be >= 1, got {accumulate!r}.")
    gradients, optimizer, sync = split_chain(optimizer, gradients, sync)
    independent = isinstance(sync, str) and sync == "none"
    if not independent and sync is not None and not isinstance(sync, ParameterTransform):
        raise ValueError(
            '`sync` must be a js.ParameterTransform such as js.local_sgd(...), None, or "none" for '
            f"replicas that train independently, got {sync!r}; other transforms go into "
            "`optimizer` or `gradients`."
        )
    if independent and model_state == "broadcast":
        raise ValueError(
            '`sync`="none" lets replicas train independently, and `model_state`="broadcast" gives '
            "all replica 0's before every forward pass: leave one of the two out."
        )
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(
            f'`policy` must be a js.Policy such as js.Policy("bfloat16"), got {policy!r}.'
        )
    options = ()
    if compiler_options is not None:
        options = checked_compiler_options(compiler_options, mesh)
    exchange = sync if isinstance(sync, ParameterTransform) else None
    check_axes((gradients, optimizer, exchange), mesh, axis_name)
    if embeddings is not None:
        check_with_tables(gradients)
    lookup = None if embeddings is None else lookup_of(embeddings, mesh, axis_name)
    if lookup is not None and exchange is not None:
        exchange = lookup.of_sync(exchange)
    program = LossProgram.of(loss_fn)
    program.check_mesh(mesh)
    loss = as_full_loss(program.weighted or loss_fn)
    if program.dispatch is not None:
        loss = of_results(loss, policy)
    elif policy is not None:
        loss = computing_in(policy, loss)
    optimizer = over_stages(program.tied_transform(optimizer))
    if program.param_types is not None:  # refuses at once what takes leaves of several stages
        jax.eval_shape(optimizer.init, program.param_types)
    if gradients is not None and spec_of(gradients).clips:
        gradients = program.tied_transform(gradients)
    specs = program.param_specs
    if specs is not None and exchange is not None and exchange.shards_whole_leaves:
        exchange = exchange.with_specs(specs, of_state=True)
    cuts = num_microbatches if program.dispatch is not None else 1
    step = Update(
        batches=BatchGradients(
            loss=loss,
            axis_name=axis_name,
            accumulate=num_microbatches // cuts,
            model_state="local" if independent else model_state,
            unscales="unscaled" in spec_of(optimizer).takes,
        ),
        gradients=None if gradients is None else checked_gradients(gradients),
        optimizer=optimizer,
        sync=None if exchange is None else exchange.sized(dict(mesh.shape)),
        axis_name=axis_name,
        program=program,
        independent=independent,
        policy=policy,
        cuts=cuts,
    )
    if lookup is not None:
        step = UpdateWithTables.of(step, lookup)
    runner = Runner(step, lookup, mesh, mode, host_batch, donate, options)
    return TrainStep(runner, host_batch, settings)


def of_results(loss: FullLoss, policy: Policy | None) -> FullLoss:
    """Return the loss of a batch `WithResults`, from results that were computed in `policy`."""

    def full(params: PyTree, batch: WithResults, **context: Any) -> Any:
        def of_batch(params: PyTree, _: PyTree, **context: Any) -> Any:
            return loss(params, batch.results, **context)

        computed = of_batch if policy is None else computing_in(policy, of_batch)
        return computed(params, batch.batch, **context)

    return full
