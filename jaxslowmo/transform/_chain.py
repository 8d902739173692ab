"""Transforms joined, stacked states of them, and copies of the parameters that optimizers keep.

Most optimizers read the parameters that they are given and remember gradients. Some keep
parameters: COCOB computes every new value from the first one, schedule-free training from a
sequence of its own. An exchange moves the parameters by d, and such an optimizer, which does not
know, moves them back.

An optimizer without weight decay does not care where the origin is: with all parameters that it
knows shifted by d, its next step is the same step, from there. So an exchange is a shift of one
replica's origin: copies that *stand for the replica's parameters* are shifted likewise, and what it
has in store (momentum, bets, a point to come back to) keeps its meaning. Since the shifts of an
average cancel, the mean of the copies over the replicas stays what it was, without communication.

Other copies are *points to measure from*, such as the initial parameters of DoG, whose rate is the
distance from there: they are the same on all replicas and stay where they are.
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
from .._support.types import AxisName, PyTree
from ..mesh import (
    AnyMesh,
    Layouts,
    axis_names,
    check_same_tree,
    check_stacked,
    kept_with,
    layouts_of,
    map_replicas,
    model_axes,
    on_mesh,
    sharded_like,
    varying_axes,
)
from ..tree import added, apply_exactly, cast, leaf_names, updates_to
from ._checks import check_weight, setting, unless_idle
from ._gradients import GradientTransform, joined, over_stages, spec_of
from ._parameter_transform import ParameterTransform
from ._spec import check_order, holds_state

# By the class of a state: its fields that stand for the replica's own parameters, and move with
# them, and those that something is measured from.
_MOVES: dict[type, tuple[str, ...]] = {}
_STAYS: dict[type, tuple[str, ...]] = {}


def remembers_parameters(
    kind: type, *, moves: tuple[str, ...] = (), stays: tuple[str, ...] = ()
) -> None:
    """Say which fields of an optimizer's state are copies of the parameters.

    For optimizers of your own; those of optax are known. `js.make_train_step(sync=...)` and
    `js.chain` then add to the fields in `moves` what an exchange adds to the parameters.

    Args:
      kind: the state class, a NamedTuple, wherever it stands in the state of the optimizer.
      moves: fields from which the optimizer computes where the parameters shall be: trees like the
        parameters, in any floating dtype.
      stays: fields that it measures from alone, such as the initial parameters as the origin of a
        distance. They are left as they are.

    Raises:
      ValueError: `kind` is no NamedTuple or has no such fields, or a field is in both.

    Example:
      class MyState(NamedTuple):
          start: Any
          sum: Any

      js.remembers_parameters(MyState, moves=("start",))

    Communication: none.
    """
    known = getattr(kind, "_fields", None)
    if known is None:
        raise ValueError(f"remembers_parameters: `kind` must be a NamedTuple, got {kind!r}.")
    wrong = [name for name in (*moves, *stays) if name not in known]
    if wrong or set(moves) & set(stays):
        raise ValueError(
            "remembers_parameters: `moves` and `stays` must name fields of "
            f"{kind.__name__}, {list(known)}, each once; got moves={moves!r}, stays={stays!r}."
        )
    _MOVES[kind], _STAYS[kind] = tuple(moves), tuple(stays)


def _know_optax() -> None:
    """Those of optax and optax.contrib, as far as this version has them."""
    known = {
        # p = init_particles + bet.
        "COCOBState": (("init_particles",), ()),
        # p <- (1 - momentum) (x0 - s / sigma) + momentum p.
        "MadgradState": (("x0",), ()),
        # z is the sequence that takes the steps; p lies between it and its average.
        "ScheduleFreeState": (("z",), ()),
        # Where the parameters return to after a step up the slope.
        "SAMState": (("cache",), ()),
        # Distances, or correlations with a distance, from the initial point set the rate.
        "DoGState": ((), ("init_params",)),
        "DoWGState": ((), ("init_params",)),
        "ProdigyState": ((), ("params0",)),
        # p = x0 - s Delta, where Delta is computed anew from p in each update: it has what moved.
        "MechanicState": ((), ("x0",)),
        # Where the last gradient was taken; a secant is as long as the way to where the next is.
        "ScaleByLBFGSState": ((), ("params",)),
    }
    for name, (moves, stays) in known.items():
        kind = getattr(optax.contrib, name, None) or getattr(optax, name, None)
        if kind is not None and set(moves) | set(stays) <= set(kind._fields):
            remembers_parameters(kind, moves=moves, stays=stays)


_know_optax()


def has_origin(kind: type) -> bool:
    """Whether a state class was said to hold a point to measure from, to which it may pull back."""
    return bool(_STAYS.get(kind))


def moving_states(state: PyTree) -> list[str]:
    """The states in `state`, wrapped or not, that hold copies which must move: their classes."""
    found = [x for x in jax.tree.leaves(state, is_leaf=_moves) if _moves(x)]
    return sorted(type(x).__name__ for x in found)


def moved_copies(state: PyTree, params: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """The state of an optimizer whose updates an exchange has changed.

    Args:
      state: of an optimizer, wrapped as one likes.
      params: before the update.
      before: the optimizer's updates.
      after: what the parameter transform made of them.

    Returns:
      The state with `after - before` added to the copies that move; the state itself where there
      are none.

    Raises:
      ValueError: a copy that is no tree like the parameters.

    Communication: none.
    """
    if not moving_states(state):
        return state

    def finite(d: jax.Array) -> jax.Array:
        # Of parameters that are not finite nothing is to be learnt.
        return jnp.where(jnp.isfinite(d), d, jnp.zeros_like(d))

    # As the dtypes of the parameters hold both.
    old, new = (apply_exactly(params, updates) for updates in (before, after))
    return shifted_copies(state, jax.tree.map(finite, updates_to(old, new)))


def shifted_copies(state: PyTree, shift: PyTree) -> PyTree:
    """`state` with `shift`, a tree like the parameters, added to the copies that move."""

    def shifted(x: Any) -> Any:
        if not _moves(x):
            return x
        fields, kind = x._asdict(), type(x)
        moved = {n: _plus(f"{kind.__name__}.{n}", fields.pop(n), shift) for n in _MOVES[kind]}
        # Others may hold states of which copies move.
        return x._replace(**moved, **{n: shifted_copies(y, shift) for n, y in fields.items()})

    return jax.tree.map(shifted, state, is_leaf=_moves)


def _moves(x: Any) -> bool:
    return bool(_MOVES.get(type(x)))


def _plus(name: str, copies: PyTree, shift: PyTree) -> PyTree:
    """Copies, of all parameters or of those that a mask leaves, moved."""

    def one(copy: Any, d: Any) -> Any:
        if isinstance(copy, optax.MaskedNode):
            return copy
        if getattr(d, "shape", None) != copy.shape:
            raise ValueError
        return cast(added(cast(copy, jnp.promote_types(copy.dtype, d.dtype)), d), copy.dtype)

    if not jax.tree.leaves(copies):  # as `optax.contrib.sam(opaque_mode=True)`
        return copies
    try:
        return jax.tree.map(one, copies, shift, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    except ValueError:
        raise ValueError(
            f"{name}, a copy of the parameters in the optimizer's state, must move with them when "
            "they are synchronised, and is no tree like the parameters. Leave out what brings it "
            "into another form, such as optax.flatten."
        ) from None


# While somebody asks: states whose copies follow that chains of ours have made, by their classes.
_FOLLOWED: ContextVar[Counter[str] | None] = ContextVar("_FOLLOWED", default=None)


class Chain(GradientTransform):
    """Several transforms, one after the other, that can be told apart again. Made by `js.chain`.

    Attributes:
      parts: the transforms; those of chains inside of it in their place.
      spec: what those of them that say something of themselves say together.
    """

    parts: tuple[optax.GradientTransformation, ...]


def chain(*transforms: optax.GradientTransformation) -> Chain:
    """`optax.chain` that keeps its parts: of optax, gradient and parameter transforms of ours.

        tx = js.chain(
            js.all_reduce_gradients("replica"), optax.adamw(1e-3), js.local_sgd("replica")
        )

    `js.make_train_step(loss_fn, tx, mesh=mesh)` takes it apart into `gradients`, `optimizer` and
    `sync`; of an `optax.chain` it would not know what is in it.

    In a loop of one's own it is `optax.chain`, but for one thing. Optimizers that remember
    parameters (`optax.contrib.cocob`, `madgrad`, `schedule_free`, `sam`) would take back what a
    parameter transform behind them has moved. In this chain their copies move along, as with
    `js.make_train_step(sync=...)`.

    Args:
      *transforms: gradient transforms, optimizer, and last any `js.ParameterTransform`, or several,
        such as one per axis.

    Returns:
      An optax transform whose state is that of `optax.chain` of its parts; with a parameter
      transform `update` needs `params`. It passes on what else it is given. It may stand in other
      transforms, such as `optax.masked`.

    Raises:
      ValueError: something that is no optax transform.

    Communication: that of the transforms.
    """
    if wrong := [x for x in transforms if not (hasattr(x, "init") and hasattr(x, "update"))]:
        raise ValueError(f"chain: `transforms` must be optax transforms, got {wrong[0]!r}.")
    parts = [part for x in transforms for part in (x.parts if isinstance(x, Chain) else (x,))]
    # Copies follow what the parameter transforms at the end have done together.
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
            for transform, own in zip(transforms, states, strict=True):
                updates, new = transform.update(updates, own, params, **extra)
                after.append(new)
            return updates, tuple(after)

        own, states = run(first, updates, state[:count])
        if not last:
            return own, states
        updates, after = run(last, own, state[count:])
        own = unless_idle(own, check_weight("chain", extra.get("weight")))
        return updates, (*moved_copies(states, params, own, updates), *after)

    # The spec of each part reads its own part of the state, as `update` does.
    made = Chain(init_fn, update_fn, joined([spec_of(part) for part in parts]))
    made.parts = tuple(parts)
    return made


def noting_followed() -> AbstractContextManager[Counter[str]]:
    """State classes whose copies follow, of the states that are made meanwhile."""
    return setting(_FOLLOWED, Counter())


def note_followed(states: PyTree) -> None:
    """Take note of states that are being made, in which the copies of parameters will follow."""
    found = _FOLLOWED.get()
    # What an exchange among them has moved, they do not follow.
    if found is not None and not holds_state(states, "parameters"):
        found.update(moving_states(states))


def init(
    tx: optax.GradientTransformation,
    stacked_params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
) -> PyTree:
    """The state of `tx` for stacked parameters, made inside the mapped axes.

    Transforms that shard their state over replicas cannot be initialised outside of the axis;
    here they can.

    Args:
      tx: any optax transform or chain.
      stacked_params: tree of `(replicas, *s)`, as `js.replicate` returns it.
      mesh: mesh with `axis_name`, or a `VirtualMesh`; its other axes are bound too.
      axis_name: the replica axis, or several.

    Returns:
      The state with a leading replica axis on every leaf; copies, so the parameters can be donated.

    Raises:
      ValueError: leaves without the leading axis, trees that differ between processes (every
        difference listed with the process that has it), state that differs between the devices of
        a replica, or a chain in which something follows a parameter transform.
      UserWarning: an optimizer that remembers parameters, in a chain that `js.chain` did not make.

    Communication: none over devices; with several processes one exchange of the trees' names,
      shapes and dtypes (a few KiB) through the host.
    """
    check_stacked("init", stacked_params, mesh, axis_name)
    check_same_tree(stacked_params)

    placed = on_mesh(stacked_params, mesh, axis_name)
    automatic = model_axes(placed, mesh, axis_name)
    over = (mesh, axis_name, automatic, layouts_of(placed) if automatic else ())
    tx_init = tx.init  # held while it runs: a bound method, as of optax.MultiSteps, is made anew
    return kept_with(tx_init, over, lambda tx_init: _init_fn(tx_init, *over))(placed)


def _warn_of_copies(state: PyTree, followed: Counter[str]) -> None:
    """Warn of optimizers that take back what a parameter transform behind them does."""
    found = sorted(Counter(moving_states(state)) - followed)
    if found and holds_state(state, "parameters"):
        warn_user(
            f"init: `tx` holds an optimizer that remembers parameters ({', '.join(found)}) and a "
            "parameter transform: it takes back what that moves. Make the chain by js.chain, whose "
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
        _check_equal_inside(state, {*axis_names(axis_name), *automatic})
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


def _check_equal_inside(state: PyTree, allowed: set[str]) -> None:
    """State is stacked over replicas: one copy for all devices of a replica."""
    wrong = {
        name: axes
        for name, leaf in zip(leaf_names(state), jax.tree.leaves(state), strict=True)
        if (axes := sorted(varying_axes(leaf) - allowed))
    }
    if wrong:
        listed = ", ".join(f"{name} (over {axes})" for name, axes in wrong.items())
        raise ValueError(
            "init: `tx` keeps state that differs between the devices of a replica, and the state "
            f"is stacked over replicas only: {listed}. A hook with error feedback that reduces "
            "over inner axes needs them all in `axis_name`."
        )
