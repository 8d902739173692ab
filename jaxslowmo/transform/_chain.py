"""Chains of transforms, their stacked states, and copies of the parameters in optimizers.

Most optimizers read the parameters that they receive and store only gradients. Some store
parameters: COCOB computes every new value from the initial one, schedule-free training from a
sequence of points. An exchange changes the parameters by d. Such an optimizer does not know of the
change and undoes it in its next step.

An optimizer without weight decay does not depend on the origin: with d added to all parameters that
it stores, its next step is the same step from the new point. So an exchange is handled as a shift
of one replica's origin. Copies that *stand for the replica's parameters* are shifted by d, too, and
the rest of the state (momentum, bets, a point to return to) keeps its meaning. The shifts of an
average sum to zero, so the mean of the copies over the replicas does not change, and nothing needs
to be communicated.

Other copies are *reference points*, such as the initial parameters of DoG, whose learning rate is
the distance from them. They are the same on all replicas and are not shifted.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._support.checks import warn_user
from .._support.settings import records_settings
from .._support.types import AxisName, PyTree
from ..mesh import (
    AnyMesh,
    Layouts,
    check_same_tree,
    check_stacked,
    kept_with,
    layouts_of,
    map_replicas,
    model_axes,
    on_mesh,
    sharded_like,
)
from ..tree import added, apply_exactly, cast, updates_to
from ._checks import check_weight, setting, unless_idle
from ._gradients import GradientTransform, joined, over_stages, spec_of
from ._parameter_transform import ParameterTransform
from ._spec import check_order, holds_state

# Maps the class of a state to its fields that stand for the replica's parameters and move with
# them, and to its fields that are reference points.
_MOVES: dict[type, tuple[str, ...]] = {}
_STAYS: dict[type, tuple[str, ...]] = {}


def remembers_parameters(
    kind: type, *, moves: tuple[str, ...] = (), stays: tuple[str, ...] = ()
) -> None:
    """Register the fields of an optimizer's state that are copies of the parameters.

    Call it for your own optimizers; those of optax are registered. `js.make_train_step(sync=...)`
    and `js.chain` then add to the fields in `moves` what an exchange adds to the parameters.

    Args:
      kind: the state class, a NamedTuple, at any depth of the optimizer's state.
      moves: names of fields from which the optimizer computes new parameters: trees like the
        parameters, in any floating dtype.
      stays: names of fields that are only reference points, such as the initial parameters from
        which a distance is measured. An exchange does not change them.

    Raises:
      ValueError: `kind` is no NamedTuple or has no such fields, or a field is in both.

    Example:
      class MyState(NamedTuple):
          start: Any
          sum: Any

      js.remembers_parameters(MyState, moves=("start",))

    Communication: none.
    """
    fields = getattr(kind, "_fields", None)
    if fields is None:
        raise ValueError(f"remembers_parameters: `kind` must be a NamedTuple, got {kind!r}.")
    wrong = [name for name in (*moves, *stays) if name not in fields]
    if wrong or set(moves) & set(stays):
        raise ValueError(
            "remembers_parameters: `moves` and `stays` must name fields of "
            f"{kind.__name__}, {list(fields)}, each once; got moves={moves!r}, stays={stays!r}."
        )
    _MOVES[kind], _STAYS[kind] = tuple(moves), tuple(stays)


def _register_optax() -> None:
    """Register the optimizers of optax and optax.contrib that the installed version has."""
    copies = {
        # p = init_particles + bet.
        "COCOBState": (("init_particles",), ()),
        # p <- (1 - momentum) (x0 - s / sigma) + momentum p.
        "MadgradState": (("x0",), ()),
        # z is the sequence that takes the steps; p is between it and its average.
        "ScheduleFreeState": (("z",), ()),
        # The parameters return to the cache after a step that ascends.
        "SAMState": (("cache",), ()),
        # The rate depends on distances from the initial point, or on correlations with them.
        "DoGState": ((), ("init_params",)),
        "DoWGState": ((), ("init_params",)),
        "ProdigyState": ((), ("params0",)),
        # p = x0 - s Delta; each update computes Delta from p, which includes the exchange.
        "MechanicState": ((), ("x0",)),
        # The point of the last gradient; a secant must include the exchange up to the next point.
        "ScaleByLBFGSState": ((), ("params",)),
    }
    for name, (moves, stays) in copies.items():
        kind = getattr(optax.contrib, name, None) or getattr(optax, name, None)
        if kind is not None and set(moves) | set(stays) <= set(kind._fields):
            remembers_parameters(kind, moves=moves, stays=stays)


_register_optax()


def has_origin(kind: type) -> bool:
    """Return whether a state class has a reference point, to which it may pull parameters back."""
    return bool(_STAYS.get(kind))


def moving_states(state: PyTree) -> list[str]:
    """Return the class names of all states in `state`, at any depth, with copies that must move."""
    states = [x for x in jax.tree.leaves(state, is_leaf=_moves) if _moves(x)]
    return sorted(type(x).__name__ for x in states)


def moved_copies(state: PyTree, params: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """Return an optimizer's state whose copies of parameters follow a change by an exchange.

    Args:
      state: the optimizer's state, which other transforms may wrap.
      params: the parameters before the update.
      before: the optimizer's updates.
      after: the updates that the parameter transform returned for them.

    Returns:
      The state with `after - before` added to the copies that move; `state` itself if it has no
      such copies.

    Raises:
      ValueError: a copy that is no tree like the parameters.

    Communication: none.
    """
    if not moving_states(state):
        return state

    def finite(d: jax.Array) -> jax.Array:
        # A shift that is not finite would destroy the copies: leave them unchanged.
        return jnp.where(jnp.isfinite(d), d, jnp.zeros_like(d))

    # Subtract the new parameters as their dtypes round them, not the updates.
    old, new = (apply_exactly(params, updates) for updates in (before, after))
    return shifted_copies(state, jax.tree.map(finite, updates_to(old, new)))


def shifted_copies(state: PyTree, shift: PyTree) -> PyTree:
    """Return `state` with `shift`, a tree like the parameters, added to the copies that move."""

    def shifted(x: Any) -> Any:
        if not _moves(x):
            return x
        fields, kind = x._asdict(), type(x)
        copies = {n: _plus(f"{kind.__name__}.{n}", fields.pop(n), shift) for n in _MOVES[kind]}
        # Other fields may hold inner states with copies that move.
        return x._replace(**copies, **{n: shifted_copies(y, shift) for n, y in fields.items()})

    return jax.tree.map(shifted, state, is_leaf=_moves)


def _moves(x: Any) -> bool:
    return bool(_MOVES.get(type(x)))


def _plus(name: str, copies: PyTree, shift: PyTree) -> PyTree:
    """Return `copies` plus `shift`; `copies` may be masked, as by `optax.masked`."""

    def one(copy: Any, d: Any) -> Any:
        if isinstance(copy, optax.MaskedNode):
            return copy
        if getattr(d, "shape", None) != copy.shape:
            raise ValueError
        return cast(added(cast(copy, jnp.promote_types(copy.dtype, d.dtype)), d), copy.dtype)

    if not jax.tree.leaves(copies):  # `optax.contrib.sam(opaque_mode=True)` stores none
        return copies
    try:
        return jax.tree.map(one, copies, shift, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    except ValueError:
        raise ValueError(
            f"{name}, a copy of the parameters in the optimizer's state, must move with them when "
            "they are synchronised, and is no tree like the parameters. Leave out what brings it "
            "into another form, such as optax.flatten."
        ) from None


# Within `noting_followed`: class names of the states whose copies a `Chain` shifts, counted.
_FOLLOWED: ContextVar[Counter[str] | None] = ContextVar("_FOLLOWED", default=None)


class Chain(GradientTransform):
    """Several transforms, applied one after the other, that stay accessible. Made by `js.chain`.

    Attributes:
      parts: the transforms in order; a chain inside is replaced by its parts.
      spec: the joined spec of the parts.
    """

    parts: tuple[optax.GradientTransformation, ...]


@records_settings
def chain(*transforms: optax.GradientTransformation) -> Chain:
    """Chain gradient transforms, an optimizer and parameter transforms, and keep them accessible.

        tx = js.chain(
            js.all_reduce_gradients("replica"), optax.adamw(1e-3), js.local_sgd("replica")
        )

    `js.make_train_step(loss_fn, tx, mesh=mesh)` splits the chain into `gradients`, `optimizer` and
    `sync`, which it cannot do with an `optax.chain`.

    In your own loop it differs from `optax.chain` in one way. Optimizers that remember parameters
    (`optax.contrib.cocob`, `madgrad`, `schedule_free`, `sam`) would undo the exchange of a
    parameter transform that follows them. In this chain their copies of the parameters follow the
    exchange, as with `js.make_train_step(sync=...)`.

    Args:
      *transforms: gradient transforms, an optimizer, and last one or several
        `js.ParameterTransform`s, such as one per axis.

    Returns:
      An optax transform whose state is that of `optax.chain` of its parts; with a parameter
      transform `update` needs `params`. It passes extra arguments on to its parts. Other
      transforms, such as `optax.masked`, may wrap it.

    Raises:
      ValueError: something that is no optax transform.

    Communication: that of the transforms.
    """
    if wrong := [x for x in transforms if not (hasattr(x, "init") and hasattr(x, "update"))]:
        raise ValueError(f"chain: `transforms` must be optax transforms, got {wrong[0]!r}.")
    parts = [part for x in transforms for part in (x.parts if isinstance(x, Chain) else (x,))]
    # Copies follow the joint change by all parameter transforms at the end.
    count = len(parts)
    while count and isinstance(parts[count - 1], ParameterTransform):
        count -= 1
    every = [over_stages(part) for part in parts]
    first, last = every[:count], every[count:]

    def init_fn(params: PyTree) -> PyTree:
        states = tuple(part.init(params) for part in every)
        if last:
            note_followed(states[:count])
        return states

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        def run(
            transforms: list[optax.GradientTransformationExtraArgs], updates: PyTree, states: PyTree
        ) -> tuple[PyTree, PyTree]:
            after = []
            for transform, part_state in zip(transforms, states, strict=True):
                updates, new = transform.update(updates, part_state, params, **extra)
                after.append(new)
            return updates, tuple(after)

        steps, states = run(first, updates, state[:count])
        if not last:
            return steps, states
        updates, after = run(last, steps, state[count:])
        steps = unless_idle(steps, check_weight("chain", extra.get("weight")))
        return updates, (*moved_copies(states, params, steps, updates), *after)

    # The joined spec reads the state part by part, as `update` does.
    joined_chain = Chain(init_fn, update_fn, joined([spec_of(part) for part in parts]))
    joined_chain.parts = tuple(parts)
    return joined_chain


def noting_followed() -> AbstractContextManager[Counter[str]]:
    """Make `note_followed` count state classes within the block, in the counter that it yields."""
    return setting(_FOLLOWED, Counter())


def note_followed(states: PyTree) -> None:
    """Count the classes of new states whose copies of parameters will follow exchanges."""
    counter = _FOLLOWED.get()
    # Copies do not follow an exchange by a transform that is among these states itself.
    if counter is not None and not holds_state(states, "parameters"):
        counter.update(moving_states(states))


def init(
    tx: optax.GradientTransformation,
    stacked_params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
) -> PyTree:
    """Make the state of `tx` for stacked parameters, inside the mapped axes.

    Transforms that shard their state over replicas can only be initialised inside the axis.

    Args:
      tx: any optax transform or chain.
      stacked_params: tree of `(replicas, *s)`, as `js.replicate` returns it.
      mesh: mesh with `axis_name`, or a `VirtualMesh`; its other axes are bound too.
      axis_name: the replica axis, or several.

    Returns:
      The state with a leading replica axis on every leaf; copies, so the parameters can be donated.

    Raises:
      ValueError: leaves without the leading axis, trees that differ between processes (every
        difference listed with the process that has it), or a chain in which something follows a
        parameter transform.
      UserWarning: an optimizer that remembers parameters, in a chain that `js.chain` did not make.

    Communication: none over devices; with several processes one exchange of the trees' names,
      shapes and dtypes (a few KiB) through the host.
    """
    check_stacked("init", stacked_params, mesh, axis_name)
    check_same_tree(stacked_params)

    placed = on_mesh(stacked_params, mesh, axis_name)
    automatic = model_axes(placed, mesh, axis_name)
    over = (mesh, axis_name, automatic, layouts_of(placed) if automatic else ())
    # `kept_with` refers to it weakly, and a bound method, as of optax.MultiSteps, is a new object.
    tx_init = tx.init
    return kept_with(tx_init, over, lambda tx_init: _init_fn(tx_init, *over))(placed)


def _warn_of_copies(state: PyTree, followed: Counter[str]) -> None:
    """Warn of optimizers that undo the exchange of a parameter transform that follows them."""
    names = sorted(Counter(moving_states(state)) - followed)
    if names and holds_state(state, "parameters"):
        warn_user(
            f"init: `tx` holds an optimizer that remembers parameters ({', '.join(names)}) and a "
            "parameter transform, whose exchange it undoes. Make the chain by js.chain, whose "
            "copies move along, or pass the two as `optimizer` and `sync` of js.make_train_step."
        )


def _init_fn(
    tx_init: Callable[[PyTree], PyTree],
    mesh: AnyMesh,
    axis_name: AxisName,
    automatic: frozenset[str],
    layouts: Layouts,
) -> Callable[[PyTree], PyTree]:
    def per_replica(params: PyTree) -> PyTree:
        with noting_followed() as followed:
            state = jax.tree.map(jnp.copy, tx_init(params))
        check_order("init", state)
        _warn_of_copies(state, followed)
        return sharded_like(state, layouts)

    return jax.jit(
        map_replicas(
            per_replica,
            mesh=mesh,
            axis_name=axis_name,
            in_roles=("stacked",),
            automatic=automatic,
        )
    )
