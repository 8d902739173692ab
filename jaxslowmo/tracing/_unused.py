"""Parameters that a loss does not depend on."""

from collections.abc import Callable
from typing import Any

from .._support.types import PyTree
from ..tree import leaf_names
from ._gradients import gradient_facts


def unused_parameters(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *,
    rng: Any = None,
    model_state: PyTree | None = None,
) -> list[str]:
    """Names of the parameters that the loss does not depend on.

    Read off the traced gradient function: unused is a parameter whose gradient is zero by
    construction, whatever the values are: it does not reach the loss, or only through
    `lax.stop_gradient`, rounding, comparisons or a product with a constant zero. One that a single
    branch of a `lax.cond` uses is used, and so is one whose gradient merely happens to be zero
    (`js.skip_unused` finds those).

    Args:
      loss_fn: as for `js.make_train_step`: `(params, batch) -> loss`, `(loss, metrics)` or `(loss,
        (metrics, model_state))`, with `rng` and `model_state` as keywords if it takes them.
      params: arrays or `ShapeDtypeStruct`s, of one replica.
      batch: arrays or `ShapeDtypeStruct`s, of one replica.
      rng: PRNG key for a loss that takes one; None: any key.
      model_state: for a loss that takes one; None is {}.

    Returns:
      Leaf names such as `"head/bias"`, in flattening order; [] if all are used.

    Raises:
      ValueError: `loss_fn` not callable or not scalar; no parameters, or some that are not real
        floating point.

    Example:
      >>> unused_parameters(lambda p, x: jnp.sum(p["a"] * x), {"a": 1.0, "b": 2.0}, jnp.ones(3))
      ['b']

    Nothing runs on a device. Communication: none.

    Source: the counterpart of `find_unused_parameters` in torch 2.13, `reducer.cpp`.
    """
    facts = gradient_facts("unused_parameters", loss_fn, params, batch, rng, model_state)
    return [name for name, fact in zip(leaf_names(params), facts, strict=True) if fact.zero]


def check_all_used(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *,
    rng: Any = None,
    model_state: PyTree | None = None,
) -> None:
    """Raise if the loss does not depend on some parameter, naming all of these.

    What torch's DDP does by default (`find_unused_parameters=False`), here before the first step.

    Args:
      loss_fn: as for `js.unused_parameters`.
      params: arrays or `ShapeDtypeStruct`s, of one replica.
      batch: arrays or `ShapeDtypeStruct`s, of one replica.
      rng: PRNG key for a loss that takes one; None: any key.
      model_state: for a loss that takes one; None is {}.

    Raises:
      ValueError: naming every unused parameter; as `js.unused_parameters` otherwise.

    Nothing runs on a device. Communication: none.

    Source: torch 2.13, `reducer.cpp`, "Expected to have finished reduction in the prior iteration".
    """
    names = unused_parameters(loss_fn, params, batch, rng=rng, model_state=model_state)
    if names:
        raise ValueError(
            f"`loss_fn` does not depend on these of `params`: {', '.join(names)}. Leave them out, "
            "freeze them (`optax.masked`), or wrap the optimizer in `js.skip_unused` so that "
            "weight decay and momentum leave them alone."
        )
