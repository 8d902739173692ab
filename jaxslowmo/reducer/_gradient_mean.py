"""Gradient transforms that average gradients and do nothing else to them."""

from collections.abc import Callable
from typing import Any, Literal, cast

import optax

from .._typing import PyTree

DivideBy = Literal["initial", "active"]


class GradientMean(optax.GradientTransformationExtraArgs):
    """A gradient transform that returns a mean over replicas, in every update and for every leaf.

    The gradients of rows of tables, which it is not given, can then be averaged in the same way.

    Attributes:
      divisors: the `divide_by` of every mean that it takes in some update.
    """

    divisors: frozenset[DivideBy] | None = None  # in a copy by `_replace`, which may do anything

    def __new__(
        cls,
        init: Callable[[PyTree], PyTree],
        update: Callable[..., tuple[PyTree, PyTree]],
        divisors: frozenset[DivideBy] | None = None,
    ) -> "GradientMean":
        """Make one from its functions and the `divide_by` of its means."""
        self = super().__new__(cls, cast("optax.TransformInitFn", init), update)
        self.divisors = divisors
        return self


def divisors_of(gradients: optax.GradientTransformation | None) -> frozenset[DivideBy] | None:
    """Return the `divide_by` of every mean that a gradient transform takes.

    Args:
      gradients: a gradient transform; None leaves gradients as they are, as `optax.identity()`.

    Returns:
      The empty set for a transform that leaves gradients as they are; None for one that is not
      known to do nothing but average.
    """
    if isinstance(gradients, GradientMean):
        return gradients.divisors
    return frozenset() if gradients is None or _is_identity(gradients) else None


def _is_identity(gradients: optax.GradientTransformation) -> bool:
    """Return whether a transform returns what it is given, tried with an object of no other use."""
    leaf: Any = object()
    try:
        return gradients.update(leaf, gradients.init(leaf), leaf)[0] is leaf
    except Exception:  # It computes with its gradients.
        return False
