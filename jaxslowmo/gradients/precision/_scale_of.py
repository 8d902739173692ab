"""The loss scale in the state of an optimizer, wherever it stands there."""

from typing import NamedTuple

import jax

from ..._support.types import PyTree
from ...tree import parts_of


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`."""

    loss_scale: jax.Array  # () float32, by which to multiply the next loss
    growth_count: jax.Array  # () int32, updates without overflow since the last one or growth
    hysteresis_left: jax.Array  # () int32, overflows until the scale falls; 0 once it has
    skipped: jax.Array  # () int32, updates so far that were skipped
    skipped_last: jax.Array  # () bool, whether the last one was
    inner: PyTree  # of the optimizer inside

    @property
    def scale(self) -> jax.Array:
        """The value of `loss_scale`, by the name that the field had in 0.1.0."""
        return self.loss_scale


def scale_state(opt_state: PyTree) -> DynamicLossScaleState | None:
    """The state of the `dynamic_loss_scale` in the state of an optimizer; None without one.

    Raises:
      ValueError: there are several.
    """
    found = parts_of(opt_state, DynamicLossScaleState)
    if len(found) > 1:
        raise ValueError(
            "dynamic_loss_scale: an optimizer must hold one loss scale, by which the loss is "
            f"multiplied, found {len(found)}. Put one js.dynamic_loss_scale around the whole, such "
            "as the optax.partition of optimizers."
        )
    return found[0] if found else None


def scale_metrics(before: PyTree, after: PyTree) -> dict[str, jax.Array]:
    """What an update tells of its loss scale: the one it used, all skipped updates so far.

    Args:
      before: the state of the optimizer, which may have no loss scale.
      after: likewise, after the update.
    """
    old, new = scale_state(before), scale_state(after)
    if old is None or new is None:
        return {}
    return {
        "loss_scale": old.loss_scale,
        "skipped_updates": new.skipped.astype(old.loss_scale.dtype),
    }


def was_skipped(before: PyTree, after: PyTree) -> jax.Array | None:
    """() bool: whether an update was skipped; None without a loss scale.

    `skipped_last` would not tell where `js.accumulate` stands around the loss scale: it stays in
    updates that only add up.

    Args:
      before: the state of the optimizer.
      after: likewise, after the update.
    """
    old, new = scale_state(before), scale_state(after)
    return None if old is None or new is None else new.skipped != old.skipped


# States of optax inside of which a loss scale does not work, and why.
_NOT_AROUND = {
    "ApplyIfFiniteState": "optax.apply_if_finite, which keeps every overflow from it, so that the "
    "scale never falls",
    "MultiStepsState": "optax.MultiSteps, whose sum of gradients stays NaN after an overflow",
}


def check_place(opt_state: PyTree) -> None:
    """Raise `ValueError` for a loss scale inside of what makes it useless, or for several."""
    scale_state(opt_state)

    def stands_around(x: object) -> bool:
        return type(x).__name__ in _NOT_AROUND

    for x in jax.tree.leaves(opt_state, is_leaf=stands_around):
        if stands_around(x) and parts_of(tuple(x), DynamicLossScaleState):
            raise ValueError(
                f"dynamic_loss_scale: stands inside of {_NOT_AROUND[type(x).__name__]}: put it "
                "inside of js.dynamic_loss_scale instead, or leave it out."
            )


def loss_scale_of(opt_state: PyTree) -> jax.Array | None:
    """By what the next loss is to be multiplied: the scale that `js.dynamic_loss_scale` keeps.

    `js.make_train_step` does it by itself. In a loop of your own, with the loss as `value`:

        scale = js.loss_scale_of(opt_state)
        grads = jax.grad(lambda p: loss_fn(p, batch).astype(jnp.float32) * scale)(params)
        updates, opt_state = tx.update(grads, opt_state, params)

    Args:
      opt_state: of any optax transform; the scale is found inside of wrappers and chains.

    Returns:
      () float32, in a stacked state (replicas,); None without a loss scale.

    Raises:
      ValueError: several loss scales.

    Communication: none.
    """
    state = scale_state(opt_state)
    return None if state is None else state.loss_scale
