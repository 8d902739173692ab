"""A chain that ends in parameter transforms, whose optimizers' copies follow the parameters."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import optax

from ..._typing import PyTree
from .._checks import check_weight, unless_idle
from .._registry import holds_state
from ..protocol import ParameterTransform
from ._copies import moved_copies, moving_states

# While somebody asks: states whose copies follow that chains of ours have made, by their classes.
_FOLLOWED: ContextVar[Counter[str] | None] = ContextVar("_FOLLOWED", default=None)


def chain(*transforms: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`optax.chain` with a parameter transform at its end, for a loop of one's own.

    Optimizers that remember parameters (`optax.contrib.cocob`, `madgrad`, `schedule_free`, `sam`)
    would take back what the parameter transform has moved. In this chain their copies move along,
    as with `js.make_train_step(sync=...)`; with other optimizers it is `optax.chain`.

    Args:
      *transforms: gradient transforms, optimizer, and last a `js.ParameterTransform`, or several,
        such as one per axis.

    Returns:
      An optax transform whose state is that of `optax.chain`; `update` needs `params`, and passes
      on what else it is given. It may stand in other transforms, such as `optax.masked`.

    Raises:
      ValueError: the last one is no `js.ParameterTransform`.

    Example:
      tx = js.chain(optax.contrib.cocob(), js.local_sgd("replica", sync_every=8))

    Communication: that of the transforms.
    """
    count = len(transforms)
    while count and isinstance(transforms[count - 1], ParameterTransform):
        count -= 1
    if count == len(transforms):
        raise ValueError(
            "chain: the last transform must be a js.ParameterTransform such as js.local_sgd(...), "
            f"got {transforms[-1] if transforms else 'no transforms'!r}; optax.chain makes others."
        )
    return following(transforms[:count], *transforms[count:])


def following(
    optimizers: tuple[optax.GradientTransformation, ...], *syncs: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """The chain of some transforms and of parameter transforms, with one tuple of states."""
    every = optax.chain(*optimizers, *syncs)
    first = [optax.with_extra_args_support(optimizer) for optimizer in optimizers]
    last = [optax.with_extra_args_support(sync) for sync in syncs]

    def init_fn(params: PyTree) -> PyTree:
        states: Any = every.init(params)
        _note(states[: len(first)])
        return states

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        own, states = _run(first, updates, state[: len(first)], params, extra)
        updates, after = _run(last, own, state[len(first) :], params, extra)
        own = unless_idle(own, check_weight("chain", extra.get("weight")))
        return updates, (*moved_copies(states, params, own, updates), *after)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


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


def _note(states: PyTree) -> None:
    found = _FOLLOWED.get()
    # What an exchange among them has moved, they do not follow.
    if found is not None and not holds_state(states, "parameters"):
        found.update(moving_states(states))
