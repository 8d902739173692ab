"""A chain that ends in a parameter transform, whose optimizers' copies follow the parameters."""

from typing import Any

import optax

from ..._typing import PyTree
from .._checks import check_weight, unless_idle
from .._protocol import ParameterTransform
from ._copies import moved_copies


class Chain(optax.GradientTransformationExtraArgs):
    """What `chain` returns: by its class it is known that copies follow."""


def chain(*transforms: optax.GradientTransformation) -> Chain:
    """`optax.chain` with a parameter transform at its end, for a loop of one's own.

    Optimizers that remember parameters (`optax.contrib.cocob`, `madgrad`, `schedule_free`, `sam`)
    would take back what the parameter transform has moved. In this chain their copies move along,
    as with `js.make_train_step(sync=...)`; with other optimizers it is `optax.chain`.

    Args:
      *transforms: gradient transforms, optimizer, and last a `js.ParameterTransform`.

    Returns:
      An optax transform whose state is that of `optax.chain`; `update` needs `params`, and passes
      on what else it is given.

    Raises:
      ValueError: the last one is no `js.ParameterTransform`.

    Example:
      tx = js.chain(optax.contrib.cocob(), js.local_sgd("replica", sync_every=8))

    Communication: that of the transforms.
    """
    if not transforms or not isinstance(transforms[-1], ParameterTransform):
        raise ValueError(
            "chain: the last transform must be a js.ParameterTransform such as js.local_sgd(...), "
            f"got {transforms[-1] if transforms else 'no transforms'!r}; optax.chain makes others."
        )
    return following(optax.chain(*transforms[:-1]), transforms[-1])


def following(optimizers: optax.GradientTransformation, sync: ParameterTransform) -> Chain:
    """The chain of a chain of transforms and a parameter transform, with one tuple of states."""
    first = optax.with_extra_args_support(optimizers)

    def init_fn(params: PyTree) -> PyTree:
        states: Any = first.init(params)
        return (*states, sync.init(params))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        *states, last = state
        own, states = first.update(updates, tuple(states), params, **extra)
        updates, last = sync.update(own, last, params, **extra)
        own = unless_idle(own, check_weight("chain", extra.get("weight")))
        return updates, (*moved_copies(states, params, own, updates), last)

    return Chain(init_fn, update_fn)
