"""The transforms of a step: splitting of chains, and errors for combinations that do not work."""

import math
import sys
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from ..._support.types import AxisName, PyTree
from ...gradients.clipping import ClipByGlobalNormState
from ...gradients.precision import DynamicLossScaleState, check_nesting
from ...gradients.reducer import AccumulateState
from ...mesh import AnyMesh, axis_names
from ...tracing import UpdateFacts, read_update
from ...transform import (
    Chain,
    ParameterTransform,
    chain,
    gradient_parts,
    holds_state,
    known_states,
    over_stages,
    spec_of,
    takes_extra,
)
from ...tree import leaf_names, parts_of
from .._train_state import TrainState
from ._optimized import USE_CHAIN
from ._parts import Parts

_MOVES: tuple[Literal["gradients", "parameters"], ...] = ("gradients", "parameters")
Chained = tuple[optax.GradientTransformation | None, optax.GradientTransformation, Any]
"""`gradients`, `optimizer` and `sync` of a step."""


def split_chain(
    optimizer: optax.GradientTransformation,
    gradients: optax.GradientTransformation | None,
    sync: Any,
) -> Chained:
    """Split a `js.chain` as `optimizer` into its parts; return other arguments unchanged.

    Everything up to the last transform that reduces gradients, with this library's transforms right
    after it, such as clipping, is `gradients`; a parameter transform at the end is `sync`; the rest
    is the optimizer. With an argument `gradients`, parts that do not reduce run after it.

    Raises:
      ValueError: several parameter transforms, or one and `sync`; two that reduce gradients; a
        parameter transform as `gradients`.
    """
    for name, transform in (("optimizer", optimizer), ("gradients", gradients)):
        is_transform = hasattr(transform, "init") and hasattr(transform, "update")
        if not is_transform and (transform is not None or name == "optimizer"):
            raise ValueError(f"`{name}` must be an optax transform, got {transform!r}.")
    if isinstance(gradients, ParameterTransform):
        raise ValueError(_gradients_error("a js.ParameterTransform"))
    if not isinstance(optimizer, Chain):
        return gradients, optimizer, sync
    parts = list(optimizer.parts)
    moving = []
    while parts and isinstance(parts[-1], ParameterTransform):
        moving.append(parts.pop())
    if len(moving) > 1:
        raise ValueError(
            f"`optimizer` is a js.chain with {len(moving)} parameter transforms, and a step has "
            "one: use js.hierarchical_local_sgd or js.slowmo(base=...), or an optax.chain."
        )
    count = gradient_parts(parts)
    first, last = parts[:count], parts[count:]
    reduces = any(spec_of(part).axes for part in first)
    for name, given, does in (("gradients", gradients, reduces), ("sync", sync, moving)):
        if given is not None and does:
            raise ValueError(
                f"`{name}` was given, and `optimizer` is a js.chain that has one, too: give one of "
                "the two."
            )
    if gradients is not None:
        first = [gradients, *first]
    return _chain_parts(first) if first else None, _chain_parts(last), moving[0] if moving else sync


def _chain_parts(parts: list[Any]) -> optax.GradientTransformation:
    if not parts:
        return optax.identity()
    return parts[0] if len(parts) == 1 else chain(*parts)


def check_with_tables(gradients: optax.GradientTransformation | None) -> None:
    """Raise `ValueError` unless gradients of table rows can pass through the transform."""
    if gradients is None or spec_of(gradients).of_rows:
        return
    raise ValueError(
        "`gradients` with `embeddings` must be js.all_reduce_gradients(...), "
        "js.clip_by_global_norm(...), a js.chain of such, "
        f"optax.identity() or None, got {_transform_name(gradients)}, which would take row numbers "
        "of tables for gradients, or not see them: put what shall act on dense parameters alone "
        "into `optimizer`, and join several by js.chain."
    )


def check_axes(transforms: Chained, mesh: AnyMesh, axis_name: AxisName) -> None:
    """Raise `ValueError` for axes that the mesh lacks, or a `sync` over no replica axis."""
    gradients, optimizer, sync = transforms
    axes = {"gradients": _reduction_axes(gradients), "optimizer": _reduction_axes(optimizer)}
    if sync is not None:
        axes["sync"] = {*sync.algorithm.bound_axes}
    for argument, over in axes.items():
        if unknown := sorted(over - set(mesh.axis_names)):
            raise ValueError(
                f"`{argument}` exchanges over {unknown}, and `mesh` has the axes "
                f"{list(mesh.axis_names)}: name some of these where `{argument}` is made."
            )
    of_sync = () if sync is None else sync.algorithm.axes
    # Without axes it exchanges nothing, as between the replicas of an island.
    if of_sync and not set(of_sync) & set(axis_names(axis_name)):
        raise ValueError(
            f"`sync` exchanges over {list(of_sync)}, and the replicas of this step lie along "
            f"`axis_name`={axis_name!r}: they would train independently. Name one axis in both."
        )


def _reduction_axes(transform: optax.GradientTransformation | None) -> set[str]:
    """Return the axes over which a transform declares that it reduces gradients."""
    return set() if transform is None else set(spec_of(transform).axes)


def checked_gradients(
    gradients: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Return the transform with extra arguments, and an `init` that checks its state.

    Only the state shows that a chain holds a parameter transform.
    """
    gradients = over_stages(gradients)

    def init(params: PyTree) -> PyTree:
        state = gradients.init(params)
        _check_gradients_state(state)
        return state

    return gradients._replace(init=init)


def check_transforms(
    state: TrainState, parts: Parts, mesh: AnyMesh, mode: str, *, is_first: bool
) -> bool:
    """Check the `gradients` and `optimizer` of a step by their states.

    Return whether an update is known to change the structure of the optimizer's state.

    Args:
      state: a state of the step; only the states of gradient transform and optimizer are used.
      parts: the parts of the step.
      mesh: the step's mesh.
      mode: the step's mode, `"traced"` or `"host"`.
      is_first: whether this is the step's first state; transforms that declare nothing are then
        traced to find collectives.

    Raises:
      ValueError: a js.gradients.accumulate; an undeclared collective over replicas; a parameter
        transform in `gradients`, or in `optimizer` if host-scheduled or if model state follows it;
        a loss scale in `gradients`, several in `optimizer`, or one in a wrong place; replicas that
        would train independently without `sync="none"`; an order of gradients that no transform
        would receive; with tables, an `optimizer` that does what rows need, too; an exchange in
        updates that each replica takes or drops by itself.

    Communication: none.
    """
    axes = axis_names(parts.axis_name)
    num_replicas = math.prod(mesh.shape[name] for name in axes)
    gradients, optimizer = state.exchange.gradients, parts.dense(state.opt_state)
    members = {
        "gradients": (parts.gradients or optax.identity(), gradients),
        "optimizer": (parts.optimizer, optimizer),
    }
    for name, (_, tx_state) in members.items():
        if parts_of(tx_state, AccumulateState):
            raise ValueError(
                f"`{name}` must not hold a js.gradients.accumulate, which is for loops of your "
                "own: a step adds up gradients itself. Pass what it wraps, and accumulate=k to "
                "js.make_train_step (parts of a batch) or js.train_loop (several batches), or call "
                "step.collect."
            )
    # States of transforms that declare nothing, which may hold a transform of this library.
    unknown = {name: spec_of(tx).unknown(tx_state) for name, (tx, tx_state) in members.items()}
    changes = False
    if is_first:
        params = parts.dense(state.params)
        inside = tuple(a for a in parts.inner_axes if mesh.shape[a] > 1)
        varying = frozenset(inside).difference(parts.unreduced_axes(gradients, inside))
        leaves: PyTree = jax.tree.map(lambda _: varying, params)
        for name, (tx, tx_state) in members.items():
            if not unknown[name] and not any(jax.tree.leaves(leaves)):
                continue
            facts = read_update(
                *(tx, params, tx_state),
                mesh=mesh,
                axes=parts.mapped_axes,
                varying=leaves,
                extra=takes_extra(tx_state),
            )
            if facts is None:
                leaves = jax.tree.map(lambda _: frozenset(), params)
                continue
            _check_facts(name, facts, axes, inside)
            leaves = facts.updates
            if name == "optimizer":
                changes = jax.tree.structure(facts.state) != jax.tree.structure(tx_state)
        averaged = _reduction_axes(parts.gradients) | _reduction_axes(parts.optimizer)
        needed = tuple(a for a in mesh.axis_names if a in averaged.union(inside))
        _check_inner_reduction(leaves, inside, needed)
    _check_gradients_state(gradients)
    if parts_of(optimizer, DynamicLossScaleState):
        check_nesting(optimizer)
    _check_hidden_scale(unknown["optimizer"])
    parts.check_optimizer(optimizer, unknown["optimizer"])
    _check_conditions({"gradients": gradients, "optimizer": optimizer}, num_replicas)
    moves = holds_state(optimizer, "parameters")
    if mode == "host" and moves:
        raise ValueError(
            '`mode`="host" schedules `sync` alone, and `optimizer` holds a parameter transform '
            f'too: pass that one as `sync`, or use mode="traced". {USE_CHAIN}'
        )
    dtypes = [x.dtype for x in jax.tree.leaves(state.model_state)]
    means = parts.batches.model_state == "sync_mean"
    if moves and means and any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise ValueError(
            '`model_state`="sync_mean" averages model state in updates that average parameters, '
            "and `optimizer` holds the parameter transform that does: pass that one as `sync`, or "
            f'use model_state="local". {USE_CHAIN}'
        )
    averages = (_reduction_axes(parts.gradients) | _reduction_axes(parts.optimizer)) & set(axes)
    exchanges = parts.independent or parts.sync is not None or moves or averages
    if num_replicas > 1 and not exchanges and not holds_state(unknown, "gradients"):
        axis = axes[0] if len(axes) == 1 else axes
        raise ValueError(
            f"`sync` is None, and neither `gradients` nor `optimizer` averages over {axis!r}, so "
            f"the {num_replicas} replicas would train independently. Pass "
            f"gradients=js.all_reduce_gradients({axis!r}), sync=js.local_sgd({axis!r}) or such, "
            'js.gradient_transform(...) of what averages gradients by itself, or sync="none".'
        )
    return changes


def _check_facts(
    name: str, facts: UpdateFacts, axes: tuple[str, ...], inside: tuple[str, ...]
) -> None:
    """Raise `ValueError` for collectives that a step must know, and for results that differ."""
    if names := sorted(facts.undeclared & set(axes)):
        raise ValueError(
            f"`{name}` holds a transform with collectives over {names} of which the step knows "
            f"nothing: wrap it as js.gradient_transform(tx, axes={tuple(names)!r}), and join it "
            "with others by js.chain."
        )
    if wrong := _varying_leaves(facts.state, inside):
        raise ValueError(
            f"`{name}` keeps state that differs between the devices of a replica: {wrong}. A hook "
            "with error feedback that reduces over inner axes needs them all in `axis_name`; what "
            "stands before an average over them belongs after it."
        )


def _check_inner_reduction(
    updates: PyTree, inside: tuple[str, ...], needed: tuple[str, ...]
) -> None:
    """Raise `ValueError` for updates that differ between the devices of a replica.

    `needed` are the axes over which gradients are averaged now, and those in `inside`.
    """
    if wrong := _varying_leaves(updates, inside):
        raise ValueError(
            f"`gradients` must average over the inner axes {inside} of the mesh, between whose "
            f"devices the batch is split; updates still differ there: {wrong}. Leave `gradients` "
            f"out, or pass js.all_reduce_gradients({needed!r})."
        )


def _varying_leaves(axes: PyTree, inside: tuple[str, ...]) -> str:
    """Return the names of leaves that differ over axes inside a replica, with these axes."""
    over = [sorted(each.intersection(inside)) for each in jax.tree.leaves(axes)]
    if not any(over):
        return ""
    pairs = zip(leaf_names(axes), over, strict=True)
    return ", ".join(f"{name} (over {names})" for name, names in pairs if names)


def _check_hidden_scale(unknown: list[PyTree]) -> None:
    """Raise `ValueError` for an optax.chain with a transform before its loss scale.

    In such a chain the loss scale itself divides, so earlier transforms see scaled gradients.
    """
    for state in unknown:
        states = list(state.values()) if isinstance(state, dict) else state
        if not isinstance(states, list) and type(states) is not tuple:
            continue
        places = [i for i, part in enumerate(states) if parts_of(part, DynamicLossScaleState)]
        if places and not all(holds_state(part, "gradients") for part in states[: places[0]]):
            raise ValueError(
                "`optimizer` is an optax.chain with a transform before a "
                "js.dynamic_loss_scale, which would see gradients that are still scaled. "
                f"{USE_CHAIN}"
            )


def _check_conditions(states: dict[str, PyTree], num_replicas: int) -> None:
    """Raise `ValueError` for a transform that exchanges in a wrapper that may not call it."""
    for argument, state in states.items():
        for x, known in known_states(state):
            if not any(holds_state(tuple(x), kind) for kind in _MOVES):
                continue
            if isinstance(x, optax.ApplyIfFiniteState) and num_replicas > 1:
                raise ValueError(
                    f"`{argument}` holds an optax.apply_if_finite around a transform that "
                    "exchanges: a replica that drops an update would leave the others waiting for "
                    "it. Put it around the optimizer alone."
                )
            if isinstance(x, optax.MultiStepsState) and argument == "gradients":
                raise ValueError(
                    "`gradients` holds an optax.MultiSteps around a transform that exchanges, and "
                    f"would give the optimizer zeros in calls that only collect: {known.instead}."
                )


# States of transforms of this package that act on a whole update, but in the step see its dense
# part only.
_SEE_DENSE_ALONE: dict[type, str] = {
    ClipByGlobalNormState: "js.clip_by_global_norm, whose norm is that of the whole model: pass it "
    "last in `gradients`, or clip dense gradients alone by optax.clip_by_global_norm",
}


def check_optimizer_with_tables(optimizer: PyTree, unknown: PyTree) -> None:
    """Raise `ValueError` for an `optimizer` with transforms that table rows would need, too."""
    wrong = [
        f"a transform of js that exchanges {moves}, since dense parameters would agree and tables "
        f"drift apart: pass it as `gradients` or `sync`. {USE_CHAIN}"
        for moves in _MOVES
        if holds_state(optimizer, moves)
    ]
    if parts_of(unknown, DynamicLossScaleState):
        wrong.append(f"a js.dynamic_loss_scale that the step does not see. {USE_CHAIN}")
    wrong += [text for kind, text in _SEE_DENSE_ALONE.items() if parts_of(optimizer, kind)]
    for _, known in known_states(optimizer):
        if known.with_tables:
            wrong.append(f"{known.name}, and {known.with_tables}: {known.instead}")
    if wrong:
        raise ValueError(
            "`optimizer` with `embeddings` is not given rows of tables, and must not hold "
            f"{wrong[0]}"
        )


def _check_gradients_state(state: PyTree) -> None:
    if holds_state(state, "parameters"):
        raise ValueError(_gradients_error("a chain that holds a parameter transform"))
    if parts_of(state, DynamicLossScaleState):
        raise ValueError(
            "`gradients` must not hold a js.dynamic_loss_scale: the optimizer would take the zeros "
            "of a skipped update for gradients. Put it around `optimizer`."
        )


def _gradients_error(what: str) -> str:
    return (
        "`gradients` must be a gradient transform such as js.all_reduce_gradients(...), got "
        f"{what}. It would take gradients for updates of parameters, and replicas would drift "
        "apart: pass it as `sync`, or last in a chain as `optimizer`."
    )


def _transform_name(transform: Any) -> str:
    """Return the name of the function that made a transform, such as "optax.chain"."""
    update: Any = getattr(transform, "update", None)
    if not hasattr(update, "__qualname__"):
        return type(transform).__name__
    package, *folders = update.__module__.split(".")
    name = update.__qualname__.partition(".")[0]
    if package != "jaxslowmo":
        return f"{package}.{name}"
    is_top = name in sys.modules[package].__all__
    return f"js.{name}" if is_top else f"js.{folders[0]}.{name}"
