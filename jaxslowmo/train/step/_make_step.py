"""Build a training step from a loss function, an optimizer and what to exchange."""

from collections.abc import Callable
from typing import Any, Literal

import optax

from ..._support.checks import as_int, check_choice
from ..._support.types import AxisName
from ...embedding import Embeddings, lookup_of
from ...gradients.precision import Policy, computing_in
from ...mesh import AnyMesh, replica_count
from ...tracing import FullLoss, as_full_loss
from ...transform import ParameterTransform, over_stages, spec_of
from .._train_state import with_raw_keys
from ..batches import HostBatch
from ._step_runner import Mode
from ._train_step import TrainStep
from ._transforms import check_axes, check_beside_tables, checked_gradients, told_apart
from .update import (
    Differentiation,
    Dispatched,
    GradientOrder,
    ModelStateMode,
    NoTables,
    StepParts,
    Validate,
)


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
    raw_keys: bool = False,
    order: GradientOrder = "reverse",
    host_batch: HostBatch = "local",
    donate: bool = True,
    embeddings: Embeddings | None = None,
    policy: Policy | None = None,
    validate: Validate = "before",
) -> TrainStep:
    """A data-parallel training step over replicas.

    Args:
      loss_fn: `loss_fn(params, batch, *, rng, model_state) -> (loss, (metrics, model_state))` for
        the examples of one device; also `(params, batch) -> loss` or `(loss, metrics)`, with `rng`
        where it is wanted. metrics: dict of scalars. Where it has an attribute `before_run`, that
        is called before every program that is run, and what it raises is raised: such as that what
        was compiled is out of date. Where it has attributes `params_form` and
        `model_state_form`, `step.init` calls these with parameters and model state, for the form in
        which the loss function takes them, and where it has an attribute `param_specs`, of these
        parameters, `sync` is told how they are sharded: what `js.pipelined` returns is such a loss
        function. One with an attribute `dispatch`, as a pipeline that the host dispatches has it,
        is computed outside of the step's programs, which take its results in place of the batch.
      optimizer: any optax transform; its state stays local to each replica. A whole `js.chain` is
        taken apart: everything up to the last transform that reduces gradients, and clipping of
        ours behind it, is `gradients`, a parameter transform at its end `sync`, the rest the
        optimizer. An `optax.chain` of such is called as in a loop of one's own; what needs its
        parts refuses it by name. It is told `value`, the
        loss, averaged in at least float32 over the replicas, with their weights, in the updates in
        which gradients were; `grad`, the gradients that it is given; and where these are not
        averaged over anything also `value_fn`, the replica's own loss on its batch (line searches).
        Copies of the parameters in its state move with what `sync` moves; see
        `js.remembers_parameters`.
      sync: a parameter transform over `axis_name` (`js.local_sgd`, `js.sgp`, `js.slowmo`, ...), or
        None where gradients are averaged over the replicas. Several replicas that are given
        neither, here, as `gradients` or in a chain of ours as `optimizer`, are refused; `"none"`
        says that they train apart, and exchange no model state either.
      gradients: a gradient transform; `js.all_reduce_gradients(axis_name)` for plain data
        parallelism. None, or one that reduces over nothing (`js.clip_by_global_norm`), has them
        averaged over the inner axes of the mesh first, if it has any. A transform of one's own with
        collectives over replicas is wrapped as `js.gradient_transform(tx)`.
      mesh: `js.make_mesh({"replica": R})`, with inner axes such as `"device"` that share a
        replica's batch, or `js.virtual_mesh`. Axes over which parameters are sharded are left to
        the compiler.
      axis_name: the replica axis.
      mode: `"traced"` decides inside one program what is due; `"host"` compiles one program per
        phase and chooses on the host, so that local steps hold no collective over `axis_name`.
      accumulate: microbatches per update; gradients are averaged locally, then exchanged once.
      model_state: `"sync_mean"` averages it over replicas in updates that synchronise parameters
        (every one without `sync`), `"broadcast"` takes replica 0's before every forward pass,
        `"local"` never exchanges it. Over inner axes it is averaged always. Typed PRNG keys in it
        (nnx.Dropout) are never exchanged, and differ on all devices in the forward pass.
      raw_keys: whether the loss function's model state holds PRNG keys as pairs of uint32, as Keras
        and `jax.random.PRNGKey` make them. `step.init` then makes a typed key of every uint32 leaf
        of shape (2,), which the loss function is given as a pair again, and returns as one. Arrays
        of several keys, of shape (n, 2), are not seen: give typed keys there. A state that holds
        such a leaf as it was, since `js.TrainState.create` made it, is refused.
      order: in which gradients go into buckets, where their transform does not say: `"reverse"`
        leaf order, or `"ready"`, the order in which the backward pass finishes them, found from the
        traced loss function.
      host_batch: what a batch of the host is, and its weight, in several processes: `"local"`, this
        process' part of it, the rows for its own devices in their order along the axes over which
        the batch is split; or `"global"`, the same whole batch on every process, which cuts its
        part out. Either way nothing is sent. Processes whose devices hold the same part, such as
        those of a model axis over processes, give the same. In one process both are equal.
      donate: reuse the state's buffers for the new state.
      embeddings: of `js.embeddings`: tables of which each step moves the rows that it has used.
        `loss_fn` then takes `embedded`, by feature what was looked up for the examples of one
        device; `params` are the dense parameters, in the state `js.WithTables(dense, tables)`.
        Tables have no dense gradient and no part in `optimizer`, which therefore must not average,
        clip or collect gradients, nor exchange parameters. Gradients of rows pass through
        `gradients` as dense ones do: `js.all_reduce_gradients`, `js.post_local_gradients`,
        `js.clip_by_global_norm`, a `js.chain` of these, `optax.identity()` or None.
        `sync` exchanges tables as it does other leaves. The batch is split over their axis, too,
        between whose devices dense gradients are averaged.
      policy: the dtype in which the loss function computes, apart from that of the parameters;
        None: as they and the batch are. With `js.Policy("float16")` put `js.dynamic_loss_scale`
        around `optimizer`: the loss is then multiplied by its scale wherever gradients are taken,
        and these are divided by it at once; metrics are of the loss itself, and have `loss_scale`
        and `skipped_updates`, too.
      validate: `"before"`: gradients are clipped, and looked at for what is not finite, before the
        optimizer sees them. `"after"`: the optimizer makes its update of them as they are, while
        devices that share a model find the norm of `js.clip_by_global_norm` and what
        `js.dynamic_loss_scale` asks; then the update stands, is dropped, or is made again from the
        old state with clipped gradients. Equal results; a second update by the optimizer in
        updates that clip (with virtual replicas in all).

    Returns:
      A `TrainStep`: `step(state, batch) -> (state, metrics)`, `step.init(params)` makes the state.

    Raises:
      ValueError: unknown axis, mode, model_state, order, host_batch or validate; accumulate < 1;
        `sync` that is neither a `ParameterTransform` nor `"none"`, or `"none"` with
        `model_state="broadcast"`; a parameter transform as `gradients`; `gradients` beside a
        `js.chain` that reduces, `sync` beside one that exchanges, several parameter transforms in
        it; with `embeddings`
        `gradients` that rows cannot pass through. At `init`, or at the first step, collectives over
        replicas in a transform that does not tell of them; a parameter transform inside `gradients`
        or, host-scheduled or with model state that follows it, hidden in `optimizer`; replicas that
        would train apart; with `embeddings`, on any number of replicas, an `optimizer` that
        averages gradients, exchanges parameters, or holds `js.clip_by_global_norm`,
        `optax.apply_if_finite`, `optax.MultiSteps` or `js.accumulate`; `optax.apply_if_finite`
        around what exchanges; with `validate="after"` neither clipping nor loss scale of ours, one
        that an `optax.chain` hides, several clippings, one in `gradients` that is not last, one
        beside an `optimizer` that exchanges by itself; with `order="ready"` a reduction that an
        `optax.chain` hides. At the first step a `value` that nobody knows how to average. At trace
        time batches that do not split evenly, gradients that were not averaged over the inner axes,
        a line search where they are averaged over any, `js.slowmo(learning_rate="optimizer")` and
        an `optimizer` whose state does not hold one learning rate.
      UserWarning: once, for an `optimizer` that takes back what `sync` does (one that nobody knows
        is tried on few numbers), for `optax.contrib.sam` with a period that `sync` cuts, and for
        `js.Policy("float16")` without a `js.dynamic_loss_scale` in `optimizer`.

    Communication: what `gradients` and `sync` state, once per update whatever `accumulate`; model
      state as above (one all-reduce of its bytes); over inner axes one all-reduce each of metrics
      and model state; where the optimizer uses an averaged `value`, one of 4 bytes (12 with a
      weight); with `embeddings` and `gradients`, one of 4 bytes with which all skip an update of
      ids that are in no table.
    """
    replica_count("make_train_step", mesh, axis_name)
    choices = {
        "mode": (mode, Mode),
        "model_state": (model_state, ModelStateMode),
        "host_batch": (host_batch, HostBatch),
        "order": (order, GradientOrder),
        "validate": (validate, Validate),
    }
    for argument, (value, kind) in choices.items():
        check_choice(argument, value, kind)
    num_microbatches = as_int(accumulate, 1)
    if num_microbatches is None:
        raise ValueError(f"`accumulate` counts microbatches and must be >= 1, got {accumulate!r}.")
    gradients, optimizer, sync = told_apart(optimizer, gradients, sync)
    apart = isinstance(sync, str) and sync == "none"
    if not apart and sync is not None and not isinstance(sync, ParameterTransform):
        raise ValueError(
            '`sync` must be a js.ParameterTransform such as js.local_sgd(...), None, or "none" for '
            f"replicas that train apart, got {sync!r}; other transforms go into `optimizer` or "
            "`gradients`."
        )
    if apart and model_state == "broadcast":
        raise ValueError(
            '`sync`="none" says that replicas train apart, and `model_state`="broadcast" gives all '
            "of them replica 0's before every forward pass: leave one of the two out."
        )
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(
            f'`policy` must be a js.Policy such as js.Policy("bfloat16"), got {policy!r}.'
        )
    if not isinstance(raw_keys, bool):
        raise ValueError(f"`raw_keys` must be True or False, got {raw_keys!r}.")
    own_sync = sync if isinstance(sync, ParameterTransform) else None
    check_axes((gradients, optimizer, own_sync), mesh, axis_name)
    if embeddings is not None:
        check_beside_tables(gradients)
    lookup = NoTables() if embeddings is None else lookup_of(embeddings, mesh, axis_name)

    def completed(loss_fn: Callable[..., Any]) -> FullLoss:
        loss = as_full_loss(loss_fn)
        if raw_keys:
            loss = with_raw_keys(loss)
        return loss if policy is None else computing_in(policy, loss)

    loss, dispatched = completed(loss_fn), None
    if hasattr(loss_fn, "dispatch"):
        loss_fn.check_mesh(mesh)  # pyright: ignore[reportFunctionMemberAccess]
        is_cast = policy is not None
        dispatched = Dispatched(loss_fn, completed, num_microbatches, is_cast=is_cast)
        loss, num_microbatches = dispatched.loss, 1
    if lookup.embeddings is not None:
        loss, own_sync = lookup.of_loss(loss), lookup.of_sync(own_sync)
    specs = getattr(loss_fn, "param_specs", None)
    if specs is not None and own_sync is not None and own_sync.shards_whole_leaves:
        own_sync = own_sync.with_specs(specs, of_state=True)
    parts = StepParts(
        differentiation=Differentiation(
            loss=loss,
            axis_name=axis_name,
            accumulate=num_microbatches,
            model_state="local" if apart else model_state,
            lookup=lookup,
            unscales="unscaled" in spec_of(optimizer).takes,
            dispatched=dispatched,
        ),
        gradients=None if gradients is None else checked_gradients(gradients),
        optimizer=over_stages(optimizer),
        sync=None if own_sync is None else own_sync.sized(dict(mesh.shape)),
        apart=apart,
        axis_name=axis_name,
        order=order,
        lookup=lookup,
        validate=validate,
        raw_keys=raw_keys,
        policy=policy,
        before_run=getattr(loss_fn, "before_run", None),
        params_form=getattr(loss_fn, "params_form", None),
        model_state_form=getattr(loss_fn, "model_state_form", None),
    )
    return TrainStep(parts, mesh, mode, host_batch, donate)
