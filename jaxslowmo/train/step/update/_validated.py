"""An update that is made first, and then left as it is, clipped or dropped.

Nothing that must be known on all devices, the norm of all gradients or whether one is infinite,
stands then between the backward pass and the arithmetic of the optimizer.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax

from ...._support.types import PyTree
from ....gradients.clipping import clip_state, scaled
from ....gradients.precision import was_skipped
from ....mesh import cast_varying, varying_axes
from ....transform import Validation


class Made(NamedTuple):
    """What an optimizer made of gradients."""

    updates: PyTree
    state: PyTree
    rate: jax.Array | None  # the learning rate that it used, where it is wanted


Run = Callable[[PyTree, Validation | None], Made]
"""One update by an optimizer, of gradients; always from the same state."""


def validated(run: Run, grads: PyTree, gradients_state: PyTree, optimizer_state: PyTree) -> Made:
    """The update that `run` makes of `grads`, found without waiting for what decides about it.

    It is run as if nothing were to clip. Where the norm, once it is known, wants gradients clipped,
    it is run again, from the old state.

    Args:
      run: the optimizer.
      grads: averaged, and not clipped yet.
      gradients_state: of the gradient transform, after it, which may have found the norm.
      optimizer_state: before.

    Returns:
      What `run(clipped, None)` returns.

    Communication: that of one run.
    """
    first = run(grads, Validation())
    outside, inside = clip_state(gradients_state), clip_state(first.state)
    found = outside or inside
    if found is None:  # a loss scale alone, which has chosen already
        return first
    skipped = was_skipped(optimizer_state, first.state)

    def again() -> Made:
        clipped = grads if outside is None else scaled(grads, found.clip_factor)
        return run(clipped, Validation(inside, skipped))

    shapes = jax.eval_shape(again)

    def alike(made: Made, other: Made) -> Made:
        return jax.tree.map(
            lambda x, y: cast_varying(x, varying_axes(y) - varying_axes(x)), made, other
        )

    # NaN is no 1, either: what the clipping makes of it is what an earlier one would have made.
    return lax.cond(
        found.clip_factor != 1, lambda: alike(again(), first), lambda: alike(first, shapes)
    )
