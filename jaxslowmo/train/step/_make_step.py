"""Build a training step from a loss function, an optimizer and what to exchange."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import optax

from ..._support.checks import as_int, check_choice, checks_flags
from ..._support.types import AxisName
from ...embedding import Embeddings, tables_for_mesh
from ...gradients.precision import Policy, apply_policy
from ...mesh import AnyMesh, MapWith, replica_count
from ...tracing import as_full_loss
from ...transform import LossProgram, ParameterTransform, over_stages, spec_of
from .._batches import HostBatch
from ._compiler_options import checked_compiler_options
from ._dispatched import DispatchedGradients
from ._gradients import BatchGradients, ModelStateMode
from ._phases import Mode
from ._runner import Runner
from ._train_step import TrainStep
from ._transforms import check_axes, check_with_tables, checked_gradients, split_chain
from ._update import Update
from ._with_tables import UpdateWithTables


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
        the examples of one replica; also `(params, batch) -> loss` or `(loss, metrics)`.
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
      ValueError: an invalid value, arguments that exclude each other, or a transform in the wrong
        place; also when `init` or the first step is traced.
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
    choices = {
        "mode": (mode, Mode),
        "model_state": (model_state, ModelStateMode),
        "host_batch": (host_batch, HostBatch),
        "map_with": (map_with, MapWith),
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
            f'`policy` must be a js.gradients.Policy, such as Policy("bfloat16"), got {policy!r}.'
        )
    options = ()
    if compiler_options is not None:
        options = checked_compiler_options(compiler_options, mesh)
    exchange = sync if isinstance(sync, ParameterTransform) else None
    check_axes((gradients, optimizer, exchange), mesh, axis_name)
    if embeddings is not None:
        check_with_tables(gradients)
        embeddings = tables_for_mesh(embeddings, mesh, axis_name)
    program = LossProgram.from_loss_fn(loss_fn)
    program.check_mesh(mesh)
    if map_with == "vmap":
        what = "`embeddings`" if embeddings is not None else None
        what = '`model_state`="broadcast"' if model_state == "broadcast" else what
        what = "a pipelined `loss_fn`" if program.param_types is not None else what
        if what is not None:
            raise ValueError(
                f'`map_with`="vmap" maps the loss alone, and {what} communicates in it by itself: '
                'use map_with="shard_map".'
            )
    loss = as_full_loss(program.quotient_loss or loss_fn)
    optimizer = over_stages(program.tied_transform(optimizer))
    if program.param_types is not None:  # refuses at once what takes leaves of several stages
        jax.eval_shape(optimizer.init, program.param_types)
    if gradients is not None and spec_of(gradients).clips:
        gradients = program.tied_transform(gradients)
    differentiation: dict[str, Any] = {
        "axis_name": axis_name,
        "model_state": "local" if independent else model_state,
        "unscales": "unscaled" in spec_of(optimizer).takes,
    }
    if program.dispatch is not None:
        batches = DispatchedGradients.from_loss(
            program.dispatch, loss, policy, num_microbatches, **differentiation
        )
    else:
        if policy is not None:
            loss = apply_policy(policy, loss)
        batches = BatchGradients(loss=loss, accumulate=num_microbatches, **differentiation)
    step = Update(
        batches=batches,
        gradients=None if gradients is None else checked_gradients(gradients),
        optimizer=optimizer,
        sync=None if exchange is None else exchange.bound(dict(mesh.shape)),
        axis_name=axis_name,
        program=program,
        independent=independent,
        policy=policy,
        map_with=map_with,
    )
    if embeddings is not None:
        step = UpdateWithTables.from_dense_update(step, embeddings)
    runner = Runner(step, embeddings, mesh, mode, host_batch, donate, options)
    return TrainStep(runner, host_batch, settings)
