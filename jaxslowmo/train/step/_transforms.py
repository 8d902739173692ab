"""What a step refuses to do with transforms that exchange."""

import math
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer

from ..._typing import AxisName, PyTree
from ...mesh import AnyMesh, axis_names
from ...precision import check_place, scale_state
from ...reducer import DivideBy, divisors_of
from ...transform import ParameterTransform, holds_state
from .update import Validate, averages_without_rows, check_late


def check_gradients(gradients: optax.GradientTransformation | None) -> None:
    """Raise `ValueError` for a parameter transform in the place of a gradient transform."""
    if isinstance(gradients, ParameterTransform):
        raise ValueError(_misplaced("a js.ParameterTransform"))


def divisor_of_rows(gradients: optax.GradientTransformation | None) -> DivideBy:
    """Return the `divide_by` with which gradients of rows are averaged as dense ones are.

    Raises:
      ValueError: a gradient transform that is not known to do nothing but average.
    """
    divisors = divisors_of(gradients)
    if divisors is None or len(divisors) > 1:
        what = _name_of(gradients) + (" with two" if divisors else "")
        raise ValueError(
            "`gradients` beside `embeddings` must be js.all_reduce_gradients(...), "
            "js.post_local_gradients(...) of these with one `divide_by`, optax.identity() or None, "
            f"got {what}. Gradients of rows of tables are averaged as dense ones are, and whatever "
            "else a transform does, such as clipping or scaling, would reach dense ones alone: "
            "pass the averaging by itself, not in an optax.chain, and put what shall act on dense "
            "parameters alone into `optimizer`."
        )
    return "active" if "active" in divisors else "initial"


def check_sync_axes(sync: ParameterTransform, mesh: AnyMesh, axis_name: AxisName) -> None:
    """Raise `ValueError` for axes that the mesh lacks, or among which no replica axis is."""
    unknown = sorted({*sync.axes, *sync.local_axes} - set(mesh.axis_names))
    if unknown:
        raise ValueError(
            f"`sync` exchanges over {unknown}, and `mesh` has the axes {list(mesh.axis_names)}: "
            "name some of these where `sync` is made."
        )
    if sync.axes and not set(sync.axes) & set(axis_names(axis_name)):
        raise ValueError(
            f"`sync` exchanges over {list(sync.axes)}, and the replicas of this step lie along "
            f"`axis_name`={axis_name!r}: they would train apart. Name the same axis in both."
        )


def checked_gradients(
    gradients: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """With extra arguments, and an `init` that refuses what `check_gradients` cannot see.

    That is a chain that holds a parameter transform, known by its state.
    """
    gradients = optax.with_extra_args_support(gradients)

    def init(params: PyTree) -> PyTree:
        state = gradients.init(params)
        _check_gradients_state(state)
        return state

    return optax.GradientTransformationExtraArgs(init, gradients.update)


def check_transforms(
    opt_state: PyTree,
    *,
    mode: str,
    axis_name: AxisName,
    num_replicas: int,
    exchanges: bool,
    has_tables: bool,
    validate: Validate = "before",
) -> None:
    """Check what only the states of `gradients` and `optimizer` tell about them.

    Args:
      opt_state: of the whole chain: states of gradient transform, optimizer, parameter transform.
      mode: of the step.
      axis_name: the replica axis.
      num_replicas: along it.
      exchanges: whether the step was given `sync` or `gradients`; True where replicas were said to
        train apart.
      has_tables: whether the step was given `embeddings`.
      validate: of the step.

    Raises:
      ValueError: a parameter transform in `gradients`, or, host-scheduled, in `optimizer`; a loss
        scale in `gradients`, several in `optimizer`, or one where it does not work; several
        replicas that would train apart without anyone having said so; nothing that an update could
        be validated by afterwards, or in a place where that cannot be; beside tables an `optimizer`
        that does what rows would need, too.
    """
    gradients, optimizer = opt_state[:2]
    _check_gradients_state(gradients)
    check_place(optimizer)
    if validate == "after":
        check_late(gradients, optimizer)
    found = holds_state(optimizer, "parameters")
    if has_tables:
        _check_beside_tables(optimizer)
    if mode == "host" and found:
        raise ValueError(
            '`mode`="host" schedules `sync` alone, and `optimizer` holds a parameter transform '
            'too: pass that one as `sync`, or use mode="traced".'
        )
    if num_replicas > 1 and not (exchanges or found or holds_state(optimizer, "gradients")):
        axis = axis_name[0] if axis_name == axis_names(axis_name)[:1] else axis_name
        raise ValueError(
            "`sync` and `gradients` are both None and `optimizer` holds no transform of js, so the "
            f"{num_replicas} replicas would train apart and never meet. Pass "
            f"gradients=js.all_reduce_gradients({axis!r}) to average gradients, "
            f"sync=js.local_sgd({axis!r}) or another parameter transform to average parameters, "
            "gradients=optax.identity() where `optimizer` averages gradients by itself, or "
            'sync="none" to train them apart.'
        )


# States of transforms that act on a whole update, of which they see dense parameters alone.
_SEE_DENSE_ALONE = {
    "ClipByGlobalNormState": "js.clip_by_global_norm, whose norm is that of the whole model, and "
    "rows would be neither counted nor clipped: clip dense gradients alone by "
    "optax.clip_by_global_norm",
    "ApplyIfFiniteState": "optax.apply_if_finite, and rows would move in updates that it drops: "
    "use js.dynamic_loss_scale, which tables follow",
    "MultiStepsState": "optax.MultiSteps, and rows would move in calls that only collect: use "
    "`accumulate` of js.make_train_step or step.collect",
    "ApplyEvery": "optax.apply_every, and rows would move in calls that only collect: use "
    "`accumulate` of js.make_train_step or step.collect",
    "AccumulateAvgUpdatesState": "optax.experimental.aggregating.accumulate_avg_updates, and rows "
    "would move in calls that only collect: use `accumulate` of js.make_train_step or step.collect",
    "ConditionallyMaskState": "optax.conditionally_mask, and rows would move in updates that it "
    "drops: leave these calls out, or freeze dense parameters alone by a learning rate of 0",
    "SAMState": "optax.contrib.sam, and rows would move in its adversarial calls, too: pass "
    "the optimizer inside of it alone",
    "AccumulateState": "js.accumulate, and rows would move in calls that only collect: use "
    "`accumulate` of js.make_train_step or step.collect",
}


def _check_beside_tables(optimizer_state: PyTree) -> None:
    """Raise `ValueError` for an `optimizer` that does what rows of tables would need, too."""
    for moves in ("gradients", "parameters"):
        if holds_state(optimizer_state, moves):
            raise ValueError(
                averages_without_rows(f"holds a transform of js that exchanges {moves}")
            )

    def sees_dense_alone(x: object) -> bool:
        return type(x).__name__ in _SEE_DENSE_ALONE

    for x in jax.tree.leaves(optimizer_state, is_leaf=sees_dense_alone):
        if sees_dense_alone(x):
            raise ValueError(
                "`optimizer` beside `embeddings` updates dense parameters alone, and must not hold "
                f"{_SEE_DENSE_ALONE[type(x).__name__]}."
            )


def check_shards(shards: list[Any]) -> None:
    """Raise `ValueError` for shards of which each replica has the same one.

    Another library's `unreplicate` takes replica 0's, and the rest of the anchor is lost. The first
    elements are compared of what this process holds: a glance, not a proof.

    Args:
      shards: stacked arrays (replicas, rows, lanes), on devices; others are not looked at.

    Communication: device to host, a few elements per replica; none between replicas.
    """
    known = [x for x in shards if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    parts = [_glance(x) for x in known]
    # Parameters that start as one number have such shards, too.
    telling = any(len(x) > 1 and x.size and np.ptp(x[0]) for x in parts)
    if telling and all(np.all(x == x[:1]) for x in parts):
        raise ValueError(
            "`state`: every replica keeps another part of the anchor and of what goes with it, and "
            "here all have replica 0's: the state was made from one replica's, as "
            "`flax.jax_utils.unreplicate` and `x[0]` give it, and the rest is lost. Save all of "
            "it, by jaxslowmo.checkpoint or stacked as it is; for one copy of the parameters take "
            "`js.consensus`."
        )


_GLANCE = 64


def _glance(x: jax.Array) -> np.ndarray:
    """(replicas here, n) first elements of (replicas, rows, lanes), as this process holds them."""
    parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    rows = math.ceil(_GLANCE / max(x.shape[-1], 1))
    found = [np.asarray(parts[start][:, :rows]) for start in sorted(parts)]
    return np.concatenate([part.reshape(len(part), -1) for part in found])


def _check_gradients_state(state: PyTree) -> None:
    if holds_state(state, "parameters"):
        raise ValueError(_misplaced("a chain that holds a parameter transform"))
    if scale_state(state) is not None:
        raise ValueError(
            "`gradients` must not hold a js.dynamic_loss_scale: the optimizer would take the zeros "
            "of a skipped update for gradients. Put it around `optimizer`."
        )


def _misplaced(what: str) -> str:
    return (
        "`gradients` must be a gradient transform such as js.all_reduce_gradients(...), got "
        f"{what}. It would take gradients for updates of parameters, and replicas would drift "
        "apart: pass it as `sync`, or last in a chain as `optimizer`."
    )


def _name_of(transform: Any) -> str:
    """Return the name of the function that made a transform, such as "optax.chain"."""
    update: Any = getattr(transform, "update", None)
    if not hasattr(update, "__qualname__"):
        return type(transform).__name__
    names = update.__module__, update.__qualname__
    return ".".join(name.partition(".")[0] for name in names).replace("jaxslowmo.", "js.")
