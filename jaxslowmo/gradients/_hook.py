"""Communication hooks: functions that reduce a bucket instead of a plain mean."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._support.types import AxisName, PyTree


@dataclass(frozen=True)
class GradPiece:
    """The part of a gradient that a bucket holds.

    Attributes:
      name: name of the leaf, such as `"dense/kernel"`.
      shape: shape of the whole leaf.
      start: first element of the part, in row-major order.
      stop: one past its last element.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """True if the part is the whole leaf."""
        return self.stop - self.start == math.prod(self.shape)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The leaf's shape, or `(n,)` for a part of it."""
        return self.shape if self.is_whole else (self.stop - self.start,)


@dataclass(frozen=True)
class GradBucket:
    """One bucket of gradients of this replica; exists while a program is traced.

    Attributes:
      index: number of the bucket, in the order in which buckets are reduced.
      is_last: whether it is the last one.
      flat: (n,) the concatenated gradients, in one dtype; a `ShapeDtypeStruct` in `init`.
      pieces: the parts of gradients in it, in order.
      axis_name: the axis to reduce over.
      count: () int32, number of this update, 1, 2, ...; None in `init`.
    """

    index: int
    is_last: bool
    flat: Any
    pieces: tuple[GradPiece, ...]
    axis_name: AxisName
    count: jax.Array | None = None

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the gradients."""
        return jnp.dtype(self.flat.dtype)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.flat.shape[0]

    def split(self, flat: jax.Array) -> list[jax.Array]:
        """Return `flat` as arrays in the shapes of the gradients, 1-D for parts of a split one."""
        # Slices leave out anything after the last gradient, such as padding.
        ends = np.cumsum([0, *(piece.stop - piece.start for piece in self.pieces)])
        parts = zip(ends[:-1], ends[1:], self.pieces, strict=True)
        return [flat[a:b].reshape(piece.part_shape) for a, b, piece in parts]

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Return the concatenation of flattened `parts`: the inverse of `split`."""
        return jnp.concatenate([part.reshape(-1) for part in parts])

    def replace(self, flat: Any) -> "GradBucket":
        """Return the same bucket with other contents, possibly in another dtype."""
        return replace(self, flat=flat)


class CommHook(NamedTuple):
    """A pair of functions that reduce a bucket, called under the mapped axis.

    Attributes:
      init: function `init(bucket) -> state`, a tree of arrays of static shapes; `()` for none.
      update: function `update(bucket, state) -> (reduced, state)`, `reduced` (n,) in the bucket's
        dtype. The hook does the scaling: a mean divides by the number of replicas.
    """

    init: Callable[[GradBucket], PyTree]
    update: Callable[[GradBucket, PyTree], tuple[jax.Array, PyTree]]


def stateless(reduce: Callable[[GradBucket], jax.Array]) -> CommHook:
    """Make a hook from one function, like torch's `register_comm_hook`.

    Args:
      reduce: function `reduce(bucket) -> (n,)`, in the bucket's dtype.

    Returns:
      A `CommHook` without state.

    Example:
      >>> import jax
      >>> hook = stateless(lambda bucket: jax.lax.pmean(bucket.flat, bucket.axis_name))

    Communication: the collectives of `reduce`.
    """
    return CommHook(lambda bucket: (), lambda bucket, state: (reduce(bucket), state))


def check_dtype(owner: str, bucket: GradBucket, dtypes: Sequence[str]) -> None:
    """Raise `ValueError` at trace time if the bucket's dtype is not one of `dtypes`."""
    if bucket.dtype.name not in dtypes:
        names = ", ".join(piece.name for piece in bucket.pieces)
        raise ValueError(
            f"{owner}: gradients must be {', '.join(dtypes[:-1])} or {dtypes[-1]}, got "
            f"{bucket.dtype} ({names})."
        )


def check_hook(owner: str, hook: object) -> None:
    """Raise `ValueError` at construction unless `hook` is a `CommHook`."""
    if not isinstance(hook, CommHook):
        kind = getattr(hook, "__name__", type(hook).__name__)
        raise ValueError(
            f"{owner}: `hook` must be a js.hooks.CommHook, such as js.hooks.stateless(function), "
            f"got {kind}."
        )
