"""An update that is made first, and then left as it is, clipped or dropped.

Nothing that must be known on all devices, the norm of all gradients or whether one is infinite,
stands then between the backward pass and the arithmetic of the optimizer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from ....._typing import PyTree
from .....clipping import ClipByGlobalNormState, clip_state, scaled
from .....mesh import cast_varying, collective_axes, varying_axes
from .....precision import loss_scale_of, was_skipped
from .....transform import Validation


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

    Raises:
      ValueError: at trace time: something keeps from the clipping what it is told, or a second run
        would exchange something again.

    Communication: that of one run.
    """
    told = Validation()
    first = run(grads, told)
    outside, inside = clip_state(gradients_state), clip_state(first.state)
    found = outside or inside
    if found is None:  # a loss scale alone, which has chosen already
        return first
    if inside is not None:
        check_asked(told)
    skipped = was_skipped(optimizer_state, first.state)

    def again() -> Made:
        clipped = grads if outside is None else scaled(grads, found.clip_factor)
        return run(clipped, Validation(inside, skipped))

    second = jax.make_jaxpr(again, return_shape=True)()
    _check_silent(second[0].jaxpr)

    def alike(made: Made, other: Made) -> Made:
        return jax.tree.map(
            lambda x, y: cast_varying(x, varying_axes(y) - varying_axes(x)), made, other
        )

    # NaN is no 1, either: what the clipping makes of it is what an earlier one would have made.
    return lax.cond(
        found.clip_factor != 1, lambda: alike(again(), first), lambda: alike(first, second[1])
    )


def check_asked(validation: Validation) -> None:
    """Raise `ValueError` unless the clipping has heard of it."""
    if not validation.was_asked:
        raise ValueError(
            '`validate`="after": js.clip_by_global_norm stands inside of a transform that does not '
            "pass on what `update` is told, such as an optax.GradientTransformation of two "
            "functions (that of an optax.MultiSteps is one; js.accumulate passes it on), and would "
            "clip before: put it outside, or first in `optimizer`."
        )


def check_late(gradients_state: PyTree, optimizer_state: PyTree) -> None:
    """Raise `ValueError` unless there is something to validate, in a place where it can be late."""
    own, inside = clip_state(gradients_state), clip_state(optimizer_state)
    if own is not None and inside is not None:
        clip_state((own, inside))
    if own is not None and not _is_last(gradients_state):
        raise ValueError(
            '`validate`="after": in `gradients` js.clip_by_global_norm must stand last, since what '
            "follows it would have to run again: reorder the chain, or put it into `optimizer`."
        )
    if own is None and inside is None and loss_scale_of(optimizer_state) is None:
        raise ValueError(
            '`validate`="after" chooses between updates by js.clip_by_global_norm and '
            "js.dynamic_loss_scale, and the step has neither (optax.clip_by_global_norm cannot be "
            'late): use one of them, or leave `validate`="before".'
        )


def _is_last(state: PyTree) -> bool:
    """Whether a clipping's state is the last in that of an `optax.chain`."""
    if type(state) is tuple and state:
        return _is_last(state[-1])
    return isinstance(state, ClipByGlobalNormState)


def _check_silent(jaxpr: Any) -> None:
    if axes := collective_axes(jaxpr):
        raise ValueError(
            '`validate`="after" runs the optimizer again where gradients are clipped, and here it '
            f"exchanges over {sorted(axes)} by itself: pass what averages gradients as "
            "`gradients`, what averages parameters as `sync`."
        )
