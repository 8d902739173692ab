"""The order in which a backward pass finishes the gradients."""

from collections.abc import Callable
from typing import Any

from .._support.types import PyTree
from ._gradients import gradient_facts


def ready_order(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *,
    rng: Any = None,
    model_state: PyTree | None = None,
) -> tuple[int, ...]:
    """The order in which the backward pass of a loss finishes the gradients.

    Read off the traced gradient function: a gradient is ready at the equation that computes it,
    reshapes and casts behind it left out. For `js.all_reduce_gradients(..., order=...)`, whose
    buckets then fill in that order: what torch's reducer learns from a first, slow iteration.
    Everything that one loop (`lax.scan` over layers) yields is ready at its end, in the order in
    which an iteration computes it.

    Args:
      loss_fn: as for `js.make_train_step`: `(params, batch) -> loss`, `(loss, metrics)` or `(loss,
        (metrics, model_state))`, with `rng` and `model_state` as keywords if it takes them.
      params: arrays or `ShapeDtypeStruct`s, of one replica.
      batch: arrays or `ShapeDtypeStruct`s, of one replica; the shapes of one device's batch.
      rng: PRNG key for a loss that takes one; None: any key.
      model_state: for a loss that takes one; None is {}.

    Returns:
      Leaf positions in flattening order, first ready first. Gradients that are zero by
      construction (unused parameters) come last; what is ready at once, in reverse leaf order.

    Raises:
      ValueError: `loss_fn` not callable or not scalar; no parameters, or some that are not real
        floating point.

    Example:
      >>> layers = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}  # b is used first, ready last
      >>> ready_order(lambda p, x: jnp.sum((x @ p["b"]) @ p["a"]), layers, jnp.ones((3, 2)))
      (0, 1)

    Nothing runs on a device. Communication: none.

    Source: the counterpart of `rebuild_buckets` in torch 2.13, `reducer.cpp`.
    """
    facts = gradient_facts("ready_order", loss_fn, params, batch, rng, model_state)

    def rank(leaf: int) -> tuple[bool, int, int]:
        place, zero = facts[leaf]
        return zero, 0 if zero else place, -leaf

    return tuple(sorted(range(len(facts)), key=rank))
