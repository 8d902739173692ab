"""A chain that keeps its parts, and whose optimizers' copies follow the parameters."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import optax

from ..._typing import PyTree
from .._checks import check_weight, unless_idle
from .._registry import holds_state
from ..gradients import GradientTransform, joined, spec_of
from ..protocol import ParameterTransform
from ._copies import moved_copies, moving_states

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
    every = [optax.with_extra_args_support(part) for part in parts]
    first, last = every[:count], every[count:]

    def init_fn(params: PyTree) -> PyTree:
        states = tuple(part.init(params) for part in parts)
        if last:
            note_followed(states[:count])
        return states

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        own, states = _run(first, updates, state[:count], params, extra)
        if not last:
            return own, states
        updates, after = _run(last, own, state[count:], params, extra)
        own = unless_idle(own, check_weight("chain", extra.get("weight")))
        return updates, (*moved_copies(states, params, own, updates), *after)

    # The spec of each part reads its own part of the state, as `update` does.
    made = Chain(init_fn, update_fn, joined([spec_of(part) for part in parts]))
    made.parts = tuple(parts)
    return made


def _run(
    transforms: list[optax.GradientTransformationExtraArgs],
    updates: PyTree,
    states: PyTree,
    params: PyTree | None,
    extra: dict[str, Any],
) -> tuple[PyTree, tuple[PyTree, ...]]:
    after = []
    for transform, state in zip(transforms, states, strict=True):
        updates, state = transform.update(updates, state, params, **extra)
        after.append(state)
    return updates, tuple(after)


@contextlib.contextmanager
def noting_followed() -> Iterator[Counter[str]]:
    """State classes whose copies follow, of the states that are made meanwhile."""
    found: Counter[str] = Counter()
    token = _FOLLOWED.set(found)
    try:
        yield found
    finally:
        _FOLLOWED.reset(token)


def note_followed(states: PyTree) -> None:
    """Take note of states that are being made, in which the copies of parameters will follow."""
    found = _FOLLOWED.get()
    # What an exchange among them has moved, they do not follow.
    if found is not None and not holds_state(states, "parameters"):
        found.update(moving_states(states))
