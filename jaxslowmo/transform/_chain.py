"""Chains of transforms, and their stacked states."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    cached_program,
    check_replica_axis,
    check_same_tree,
    inner_layouts,
    map_replicas,
    model_axes,
    replica_count,
    shard_like,
    shard_replicas,
)
from ._gradients import ChainReduction, GradientTransform, over_stages, spec_of
from ._optax_states import moving_states
from ._parameter_transform import ParameterTransform
from ._state_classes import check_order, holds_state

# Within `count_shifted_states`: class names of the states whose copies a `Chain` shifts, counted.
_SHIFTED_STATES: ContextVar[Counter[str] | None] = ContextVar("_SHIFTED_STATES", default=None)


class Chain(GradientTransform):
    """Several transforms, applied one after the other, that stay accessible. Made by `js.chain`.

    Attributes:
      parts: the transforms in order; a chain inside is replaced by its parts.
      spec: what the parts do, one after the other.
    """

    parts: tuple[optax.GradientTransformation, ...]


@records_settings
def chain(*transforms: optax.GradientTransformation) -> Chain:
    """Chain transforms like `optax.chain`, so that `js.make_train_step` can see the parts.

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
    if late := [x for x in parts[:count] if isinstance(x, ParameterTransform)]:
        raise ValueError(
            f"chain: nothing but parameter transforms may follow {late[0]!r}: it would change the "
            "difference that leads to the synchronised parameters, and replicas would drift apart."
        )
    every = [over_stages(part) for part in parts]
    first, last = every[:count], every[count:]
    start = gradient_parts(parts[:count])

    def init_fn(params: PyTree) -> PyTree:
        states = tuple(part.init(params) for part in every)
        if last:
            note_shifted_states(states[:count])
        return states

    def begin(params: PyTree) -> PyTree:
        return tuple(part.init(params) for part in first[start:])

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        steps, states = updates, ()
        for part, part_state in zip(first, state, strict=False):
            steps, new = part.update(steps, part_state, params, **extra)
            states = (*states, new)
        if not last:
            return steps, states
        # Copies of parameters in the optimizer follow each exchange.
        updates, inner, after = steps, states[start:], []
        moving: Any = last
        for part, part_state in zip(moving, state[count:], strict=True):
            updates, _, new, inner = part.exchange(
                updates, [], part_state, params, moments=inner, init=begin, **extra
            )
            after.append(new)
        return updates, (*states[:start], *inner, *after)

    joined = Chain(init_fn, update_fn, ChainReduction.from_parts(*map(spec_of, parts)))
    joined.parts = tuple(parts)
    return joined


def gradient_parts(parts: Sequence[optax.GradientTransformation]) -> int:
    """Return how many of these first parts of a chain transform gradients; others the optimizer.

    That is everything up to the last transform that reduces gradients, with this library's
    transforms right after it, such as clipping.
    """

    def returns_gradients(part: optax.GradientTransformation) -> bool:
        return isinstance(part, GradientTransform) and not part.spec.returns_updates

    reducing = [i for i, x in enumerate(parts) if returns_gradients(x) and spec_of(x).axes]
    count = reducing[-1] + 1 if reducing else 0
    # After a transform of another library, which may be the optimizer, ours would see updates.
    while count < len(parts) and returns_gradients(parts[count]):
        count += 1
    return count


@contextmanager
def count_shifted_states() -> Iterator[Counter[str]]:
    """Yield a counter of state classes, in which `note_shifted_states` counts within the block."""
    counter = Counter[str]()
    token = _SHIFTED_STATES.set(counter)
    try:
        yield counter
    finally:
        _SHIFTED_STATES.reset(token)


def note_shifted_states(states: PyTree) -> None:
    """Count the classes of new states whose copies of parameters will follow exchanges."""
    counter = _SHIFTED_STATES.get()
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
    """Make the state of `tx` for a loop of your own, with a leading axis of replicas.

    Transforms that shard their state over replicas can only be initialised inside the mapped
    axis, where this function calls `tx.init`.

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
    check_replica_axis("init", stacked_params, mesh, axis_name)
    check_same_tree(stacked_params)

    placed = shard_replicas(stacked_params, mesh, axis_name)
    automatic = model_axes(placed, mesh, axis_name)
    over = (mesh, axis_name, automatic, inner_layouts(placed) if automatic else ())
    # `cached_program` refers to it weakly, and a bound method, as of optax.MultiSteps, is new.
    tx_init = tx.init
    made = cached_program(tx_init, over, lambda tx_init: _init_fn(tx_init, *over))(placed)
    # jax (0.10) leaves out arguments that a program does not use, and with them where they lie.
    return shard_replicas(made, mesh, axis_name)


def _warn_of_copies(state: PyTree, shifted: Counter[str]) -> None:
    """Warn of optimizers that undo the exchange of a parameter transform that follows them."""
    names = sorted(Counter(moving_states(state)) - shifted)
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
        with count_shifted_states() as shifted:
            state = jax.tree.map(jnp.copy, tx_init(params))
        check_order("init", state)
        _warn_of_copies(state, shifted)
        return shard_like(state, layouts, replica_count("init", mesh, axis_name))

    return jax.jit(
        map_replicas(
            per_replica,
            mesh=mesh,
            axis_name=axis_name,
            in_roles=("stacked",),
            automatic=automatic,
        )
    )
