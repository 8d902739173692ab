"""What a step refuses: transforms that do not work together, and states that are not its own.

The parts of a `js.chain`, its transforms by their axes and states, then states and windows.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from ..._support.types import AxisName, PyTree
from ...gradients import AccumulateState, ClipByGlobalNormState
from ...gradients.precision import DynamicLossScaleState, check_nesting, loss_scale_of
from ...mesh import AnyMesh, axis_names, model_axes, replica_count
from ...tracing import UpdateFacts, read_update, state_types
from ...transform import (
    Chain,
    GradientTransform,
    ParameterTransform,
    chain,
    gradient_parts,
    holds_state,
    instants,
    known_states,
    over_stages,
    replica_types,
    spec_of,
    takes_extra,
)
from ...tree import leaf_names, not_floating, parts_of
from .._train_state import TrainState
from ._averaging import USE_CHAIN
from ._update import Update

# Transforms.

_MOVES: tuple[Literal["gradients", "parameters"], ...] = ("gradients", "parameters")
Chained = tuple[optax.GradientTransformation | None, optax.GradientTransformation, Any]
"""`gradients`, `optimizer` and `sync` of a step."""


def split_chain(
    optimizer: optax.GradientTransformation,
    gradients: optax.GradientTransformation | None,
    sync: Any,
) -> Chained:
    """Split a `js.chain` as `optimizer` into three; return other arguments unchanged.

    Everything up to the last transform that reduces gradients, with this library's transforms right
    after it, such as clipping, is `gradients`; a parameter transform at the end is `sync`; the rest
    is the optimizer. With an argument `gradients`, those that do not reduce run after it.

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
    transforms = list(optimizer.parts)
    moving = []
    while transforms and isinstance(transforms[-1], ParameterTransform):
        moving.append(transforms.pop())
    if len(moving) > 1:
        raise ValueError(
            f"`optimizer` is a js.chain with {len(moving)} parameter transforms, of which a step "
            "takes one: use js.hierarchical_local_sgd or js.slowmo(base=...)."
        )
    count = gradient_parts(transforms)
    first, last = transforms[:count], transforms[count:]
    reduces = any(spec_of(tx).axes for tx in first)
    for name, argument, is_in_chain in (
        ("gradients", gradients, reduces),
        ("sync", sync, moving),
    ):
        if argument is not None and is_in_chain:
            raise ValueError(f"`{name}` must not be given beside a js.chain `optimizer` with one.")
    if gradients is not None:
        first = [gradients, *first]
    if moving:
        (sync,) = moving
    return _chain_transforms(first) if first else None, _chain_transforms(last), sync


def _chain_transforms(transforms: list[Any]) -> optax.GradientTransformation:
    if not transforms:
        return optax.identity()
    return transforms[0] if len(transforms) == 1 else chain(*transforms)


def check_with_tables(gradients: optax.GradientTransformation | None) -> None:
    """Raise `ValueError` unless gradients of table rows can pass through the transform."""
    if gradients is None or spec_of(gradients).of_rows:
        return
    raise ValueError(
        "`gradients` with `embeddings` must be js.all_reduce_gradients(...), js.clip_by_global_norm"
        f"(...) or a js.chain of such, got {_transform_name(gradients)}, which does not know rows "
        "of tables: what is for dense parameters alone goes into `optimizer`."
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
                f"`{argument}` must exchange over axes of `mesh`, {list(mesh.axis_names)}, got "
                f"{unknown}."
            )
    sync_axes = () if sync is None else sync.algorithm.axes
    # Without axes it exchanges nothing, as between the replicas of an island.
    if sync_axes and not set(sync_axes) & set(axis_names(axis_name)):
        raise ValueError(
            f"`sync` must exchange over `axis_name`={axis_name!r}, of the replicas, got "
            f"{list(sync_axes)}."
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


def _checked_structure_change(
    state: TrainState, update: Update, mesh: AnyMesh, mode: str, *, is_first: bool
) -> bool:
    """Return the result of `checked_structure_change`, once both transforms are checked.

    Args:
      state: a state of the step; only the states of gradient transform and optimizer are used.
      update: the update of the step.
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
    axes = axis_names(update.axis_name)
    num_replicas = math.prod(mesh.shape[name] for name in axes)
    gradients, optimizer = state.exchange.gradients, update.dense(state.opt_state)
    averaged = _reduction_axes(update.gradients) | _reduction_axes(update.optimizer)
    members = {
        "gradients": (update.gradients or optax.identity(), gradients),
        "optimizer": (update.optimizer, optimizer),
    }
    for name, (_, tx_state) in members.items():
        if parts_of(tx_state, AccumulateState):
            raise ValueError(
                f"`{name}` must not hold a js.gradients.accumulate, since a step adds up gradients "
                "itself: pass accumulate=k to js.make_train_step or js.train_loop."
            )
    # States of transforms that declare nothing, which may hold a transform of this library.
    unknown = {name: spec_of(tx).unknown(tx_state) for name, (tx, tx_state) in members.items()}
    changes = False
    if is_first:
        params = update.dense(state.params)
        inside = tuple(a for a in update.inner_axes if mesh.shape[a] > 1)
        varying = frozenset(inside).difference(update.unreduced_axes(gradients, inside))
        leaves: PyTree = jax.tree.map(lambda _: varying, params)
        for name, (tx, tx_state) in members.items():
            if not unknown[name] and not any(jax.tree.leaves(leaves)):
                continue
            facts = read_update(
                *(tx, params, tx_state),
                mesh=mesh,
                axes=update.mapped_axes,
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
        if wrong := _varying_leaves(leaves, inside):
            needed = tuple(a for a in mesh.axis_names if a in averaged.union(inside))
            raise ValueError(
                f"`gradients` must average over the inner axes {inside}, between which updates "
                f"still differ: {wrong}. Leave it out, or pass js.all_reduce_gradients({needed!r})."
            )
    _check_gradients_state(gradients)
    if parts_of(optimizer, DynamicLossScaleState):
        check_nesting(optimizer)
    _check_hidden_scale(unknown["optimizer"])
    update.check_optimizer(optimizer, unknown["optimizer"])
    _check_conditions({"gradients": gradients, "optimizer": optimizer}, num_replicas)
    moves = holds_state(optimizer, "parameters")
    if mode == "host" and moves:
        raise ValueError(
            '`mode`="host" schedules `sync` alone, and `optimizer` holds a parameter transform: '
            f"pass it as `sync`. {USE_CHAIN}"
        )
    dtypes = [x.dtype for x in jax.tree.leaves(state.model_state)]
    averages_state = update.differentiated_loss.model_state_mode == "sync_mean"
    if moves and averages_state and any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise ValueError(
            '`model_state`="sync_mean" follows `sync`, and `optimizer` holds the parameter '
            f'transform: pass it as `sync`, or use "local". {USE_CHAIN}'
        )
    if not (moves or holds_state(unknown, "gradients") or _declares_exchange(update, mesh)):
        raise ValueError(_independent_error(update, mesh))
    return changes


def check_exchanges(update: Update, mesh: AnyMesh) -> None:
    """Raise `ValueError` for replicas that would train independently, when a step is made.

    An optax chain hides the transforms in it, and its state shows them. That of no parameters does,
    unless a mask or labels need the parameters: then the first state is checked. So it is with
    `gradients` of the user's own, which are traced for collectives that they do not declare.
    """
    is_own = not isinstance(update.gradients, GradientTransform | None)
    if is_own or _declares_exchange(update, mesh):
        return
    types = update.loss_program.param_types
    transforms = [tx for tx in (update.gradients, update.optimizer) if tx is not None]
    try:
        states = [jax.eval_shape(tx.init, {} if types is None else types) for tx in transforms]
    except Exception:  # of any kind, since users write masks and optimizers
        return
    unknown = [spec_of(tx).unknown(state) for tx, state in zip(transforms, states, strict=True)]
    if not (holds_state(states, "parameters") or holds_state(unknown, "gradients")):
        raise ValueError(_independent_error(update, mesh))


def _declares_exchange(update: Update, mesh: AnyMesh) -> bool:
    """Return whether a step declares what it exchanges between replicas, or needs nothing."""
    axes = set(axis_names(update.axis_name))
    averaged = _reduction_axes(update.gradients) | _reduction_axes(update.optimizer)
    is_alone = all(mesh.shape[name] == 1 for name in axes)
    return is_alone or update.independent or update.sync is not None or bool(averaged & axes)


def _independent_error(update: Update, mesh: AnyMesh) -> str:
    axes = axis_names(update.axis_name)
    count = math.prod(mesh.shape[name] for name in axes)
    axis = axes[0] if len(axes) == 1 else axes
    return (
        f"`sync` is None and nothing averages over {axis!r}, so the {count} replicas would train "
        f"independently: pass gradients=js.all_reduce_gradients({axis!r}), "
        f'sync=js.local_sgd({axis!r}) or such, or sync="none".'
    )


def _check_facts(
    name: str, facts: UpdateFacts, axes: tuple[str, ...], inside: tuple[str, ...]
) -> None:
    """Raise `ValueError` for collectives that a step must know, and for results that differ."""
    if names := sorted(facts.undeclared & set(axes)):
        raise ValueError(
            f"`{name}` holds a transform with collectives over {names} that it does not declare: "
            f"wrap it as js.gradient_transform(tx, axes={tuple(names)!r}) in a js.chain."
        )
    if wrong := _varying_leaves(facts.state, inside):
        raise ValueError(
            f"`{name}` keeps state that differs between the devices of a replica: {wrong}. Put it "
            "after the average over these axes, or give its hook all inner axes in `axis_name`."
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
                "`optimizer` holds a transform before a js.dynamic_loss_scale, which would see "
                f"gradients that are still scaled. {USE_CHAIN}"
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
                    "exchanges, for which the others would wait: put it around the optimizer alone."
                )
            if isinstance(x, optax.MultiStepsState) and argument == "gradients":
                raise ValueError(
                    "`gradients` holds an optax.MultiSteps, which gives zeros to the optimizer in "
                    f"calls that only collect: {known.instead}."
                )


def check_optimizer_with_tables(optimizer: PyTree, unknown: PyTree) -> None:
    """Raise `ValueError` for an `optimizer` with transforms that table rows would need, too."""
    wrong = [
        f"a transform that exchanges {moves}: pass it as `gradients` or `sync`. {USE_CHAIN}"
        for moves in _MOVES
        if holds_state(optimizer, moves)
    ]
    if parts_of(unknown, DynamicLossScaleState):
        wrong.append(f"a js.dynamic_loss_scale that the step does not see. {USE_CHAIN}")
    if parts_of(optimizer, ClipByGlobalNormState):
        wrong.append("js.clip_by_global_norm, a norm of the whole model: pass it in `gradients`")
    for _, known in known_states(optimizer):
        if known.with_tables:
            wrong.append(f"{known.name}, and {known.with_tables}: {known.instead}")
    if wrong:
        raise ValueError(
            f"`optimizer` with `embeddings` sees no tables, and must not hold {wrong[0]}"
        )


def _check_gradients_state(state: PyTree) -> None:
    if holds_state(state, "parameters"):
        raise ValueError(_gradients_error("a chain that holds a parameter transform"))
    if parts_of(state, DynamicLossScaleState):
        raise ValueError(
            "`gradients` must not hold a js.dynamic_loss_scale: put it around `optimizer`."
        )


def _gradients_error(what: str) -> str:
    return (
        "`gradients` must be a gradient transform such as js.all_reduce_gradients(...), got "
        f"{what}: pass it as `sync`."
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


# States and windows.


def checked_structure_change(
    state: TrainState,
    update: Update,
    mesh: AnyMesh,
    mode: str,
    warn: Callable[[str], None],
    *,
    is_first: bool,
) -> bool:
    """Return whether an update is known to change the structure of the optimizer's state.

    First check a step's transforms with its state: raise `ValueError`, or warn.

    Args:
      state: a state of the step.
      update: the update of the step.
      mesh: the step's mesh.
      mode: the step's mode, `"traced"` or `"host"`.
      warn: a function that issues each message once.
      is_first: whether this is the first state of the step; checks of its types are done only then.

    Communication: none.
    """
    sync = update.sync
    check_trainable(update.dense(state.params))
    changes = _checked_structure_change(state, update, mesh, mode, is_first=is_first)
    computes = None if update.policy is None else update.policy.compute
    if computes == "float16" and loss_scale_of(state.opt_state) is None:
        warn(
            '`policy` is Policy("float16"), and without a loss scale gradients below 6e-8 become '
            '0: put js.dynamic_loss_scale(...) around `optimizer`, or use Policy("bfloat16").'
        )
    if sync is not None and is_first:
        exchanges = [t for t in instants(sync.algorithm.schedules) if sync.phase(t)]
        for _, known in known_states(update.dense(state.opt_state)):
            # Its period is not known, but only 1 divides them all.
            if known.between and math.gcd(*exchanges) == 1:
                warn(
                    f"`optimizer` holds {known.name}, and `sync` also exchanges between its "
                    f"updates, where {known.between}. Make `sync_every` a multiple of its period, "
                    f"or {known.instead}."
                )
    return changes


_USE_INIT = "Make the state by this step's `init`; `state.params` go over by `js.consensus`."


def check_is_state(state: TrainState) -> None:
    """Raise `ValueError` unless `state` has the fields of a `TrainState`."""
    if not all(hasattr(state, name) for name in TrainState._fields):
        raise ValueError(
            f"`state` must be a js.TrainState of `step.init`, got {type(state).__name__}."
        )


def check_donation(state: TrainState) -> None:
    """Raise `ValueError` for a state whose buffers were donated, with which jax 0.10 may crash."""
    check_not_donated("state", state.step, state.rng, state.params, state.opt_state)


def check_not_donated(argument: str, *trees: PyTree) -> None:
    """Raise `ValueError` if a step was given one of the trees before, and reuses its buffers.

    Only the first array of each is checked: all are donated together.
    """
    first = [x for tree in trees for x in jax.tree.leaves(tree)[:1] if isinstance(x, jax.Array)]
    if any(x.is_deleted() for x in first if not isinstance(x, Tracer)):
        raise ValueError(
            f"`{argument}` was given to a step before, which reuses its buffers (donate=True): go "
            f"on with the {argument} that it returned, or make the step with donate=False."
        )


def check_trainable(params: PyTree) -> None:
    """Raise `ValueError` unless all parameters are real floating-point arrays.

    jax does not differentiate integers. Its gradients of complex numbers are conjugated, and
    optimizers would step in the wrong direction.
    """
    if wrong := not_floating(params):
        raise ValueError(
            f"`params` must have real floating-point leaves only, got {', '.join(wrong)}: pass "
            "others as `model_state`, and of a complex leaf real and imaginary part."
        )


def check_exchange_state(state: TrainState, update: Update, mesh: AnyMesh) -> None:
    """Raise `ValueError` for a state of another `sync`, or of `gradients` that the step lacks."""
    exchange = state.exchange
    if update.gradients is None and not isinstance(exchange.gradients, optax.EmptyState):
        raise ValueError(
            "`state` must come from a step with the same `gradients`: this one has none, and "
            f"`state.exchange.gradients` is {type(exchange.gradients).__name__}. {_USE_INIT}"
        )
    expected: tuple[PyTree, PyTree] = (), ()
    if update.sync is not None:
        one = replica_types(state.params)
        algorithm = update.sync.bound(dict(mesh.shape), one).algorithm
        states = lambda params: (algorithm.local(params), algorithm.shared(params))  # noqa: E731
        expected = jax.eval_shape(states, one)
    needs, has = (
        leaf_names({"local": local, "shared": shared})
        for local, shared in (expected, (exchange.local, exchange.shared))
    )
    if needs != has:
        others = sorted({*needs} ^ {*has})[:6]
        raise ValueError(
            f"`state` must come from a step with the same `sync`, {update.sync!r}: only one of the "
            f"two has {others} in `state.exchange`. {_USE_INIT}"
        )


def check_num_replicas(state: TrainState, update: Update, mesh: AnyMesh) -> None:
    """Raise `ValueError` for a state of another number of replicas than the step's."""
    count = replica_count("step", mesh, update.axis_name)
    if np.shape(state.step) != (count,):
        raise ValueError(
            f"`state` must be of the {count} replicas of this step, along {update.axis_name!r}, "
            f"got one whose `step` has shape {np.shape(state.step)}. {_USE_INIT}"
        )


def check_optimizer_state(state: TrainState, update: Update, mesh: AnyMesh) -> None:
    """Raise `ValueError` if the optimizer's state has other leaves than the step's own makes.

    An optimizer that holds a transform of this package, whose buffers depend on more than the
    parameters, is not compared.
    """
    params, opt_state = update.dense(state.params), update.dense(state.opt_state)
    if holds_state(opt_state, "parameters") or holds_state(opt_state, "gradients"):
        return
    types = state_types(update.optimizer, params, mesh=mesh, axis_name=update.axis_name)
    if others := sorted({*leaf_names(types)} ^ {*leaf_names(opt_state)})[:6]:
        raise ValueError(
            f"`state` must come from a step with the same `optimizer`: only one of the two has "
            f"{others}. {_USE_INIT}"
        )


def check_same_model(params: PyTree, names: Sequence[str]) -> None:
    """Raise `ValueError` for parameters with other names than the first ones of the step."""
    state_names = leaf_names(params)
    if state_names != names:
        others = sorted({*state_names} ^ {*names})[:6]
        raise ValueError(
            "`state` must be of one model with the first state of this step: only one of the two "
            f"has {others}. Make a step for each model."
        )


def check_window(window: Any, state: TrainState) -> None:
    """Raise `ValueError` unless `window` is an unused window of the parameters in `state`."""
    check_not_donated("window", window.grads.sum)
    if state.step.shape != window.count.shape:
        raise ValueError(
            f"`window` must be of {state.step.shape} replicas as `state`, got {window.count.shape}."
        )
    has, holds = (
        {name: x.shape[1:] for name, x in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)}
        for tree in (state.params, window.grads.sum)
    )
    for name in {**has, **holds}:
        if has.get(name) != holds.get(name):
            raise ValueError(
                f"`window` must hold gradients of the parameters in `state`: leaf {name!r} has "
                f"shape {has.get(name)} there and {holds.get(name)} in the window."
            )


def check_window_weight(window: Any, weight: Any) -> None:
    """Raise `ValueError` if only one of a window and the weight of its next batch has weights."""
    if window is not None and (weight is None) != (window.weight is None):
        raise ValueError(
            "`weight` must be given for all batches of a window or for none, and those before had "
            f"{'none' if window.weight is None else 'one'}."
        )


def check_state_sharding(
    axes: frozenset[str], state: TrainState, mesh: AnyMesh, axis_name: AxisName
) -> None:
    """Raise `ValueError` if state is sharded over axes inside a replica that are mapped.

    There each device has all of it. `axes` are those that the compiler handles.
    """
    for part in ("opt_state", "model_state"):
        tree = getattr(state, part)
        if not (beyond := sorted(model_axes(tree, mesh, axis_name) - axes)):
            continue
        name, leaf = next(
            (name, leaf)
            for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
            if model_axes(leaf, mesh, axis_name) - axes
        )
        raise ValueError(
            f"`state`: `{part}` must not be sharded over axes that `gradients` or a "
            f"`local_axis_name` maps, got {name!r} as {leaf.sharding.spec}, over {beyond}."
        )
