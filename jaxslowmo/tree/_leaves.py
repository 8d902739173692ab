"""Leaves of a tree: their names and kinds, and arithmetic with one primitive per operation.

In a traced program `jax.numpy` takes two to four times as long for the same equation. It checks for
promotion, broadcasting and other rules of NumPy, which leaves of one shape and dtype do not need.
NumPy arrays stay NumPy arrays.
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from .._support.types import PyTree

_Part = TypeVar("_Part")


def leaf_names(tree: PyTree) -> list[str]:
    """Return readable names of the leaves in flattening order, such as `"dense/kernel"`."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") or "(root)" for path, _ in paths]


def matching_suffix(name: str, names: Collection[str]) -> str:
    """Return the longest end of a leaf's name that is one of `names`; "" if none is.

    Leaves of an optimizer's state have the names of their parameters at the ends of theirs.
    """
    words = name.split("/")
    ends = ("/".join(words[i:]) for i in range(len(words)))
    return next((end for end in ends if end in names), "")


def type_text(x: Any) -> str:
    """Return dtype and shape of an array, a number or the type of an array."""
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}"


def parts_of(tree: PyTree, kind: type[_Part]) -> list[_Part]:
    """Return the nodes of a tree that are of class `kind`, at any depth."""
    is_one = lambda x: isinstance(x, kind)  # noqa: E731
    return [x for x in jax.tree.leaves(tree, is_leaf=is_one) if is_one(x)]


def form_matcher(like: PyTree) -> Callable[[PyTree], bool]:
    """Return a function that tells whether a tree has the structure and the shapes of `like`."""
    # An optimizer keeps trees of the parameters' form (momentum) and counters. Their form
    # distinguishes them for any optimizer.
    form = jax.tree.structure(like), [np.shape(x) for x in jax.tree.leaves(like)]

    def is_alike(x: PyTree) -> bool:
        leaves, structure = jax.tree.flatten(x)
        return (structure, [np.shape(leaf) for leaf in leaves]) == form

    return is_alike


def check_arrays(owner: str, tree: PyTree) -> None:
    """Raise `ValueError` naming every leaf of `tree` that is no array or number.

    Args:
      owner: the public name that needs arrays, for the message.
      tree: arrays, numbers, anything with `dtype`, or other values of a model.

    Raises:
      ValueError: a leaf is a function, a string or the like.
    """
    wrong = [
        f"{name} ({type(x).__name__})"
        for name, x in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
        if not hasattr(x, "dtype") and not isinstance(x, bool | int | float | complex)
    ]
    if wrong:
        raise ValueError(
            f"{owner}: every leaf must be an array, got {', '.join(wrong)}. Keep the rest of a "
            "model out, as `eqx.partition(model, eqx.is_inexact_array)` does."
        )


def check_floating(owner: str, tree: PyTree) -> None:
    """Raise `ValueError` naming every leaf of `tree` that is not real floating point.

    Args:
      owner: the public name that needs floating leaves, for the message.
      tree: arrays or anything with `dtype`.

    Raises:
      ValueError: a leaf is integer, boolean, complex or a PRNG key.
    """
    if wrong := not_floating(tree):
        raise ValueError(
            f"{owner} averages real floating-point leaves only, got {', '.join(wrong)}: leave "
            "others out by `optax.masked` around the whole chain, or make them `model_state`."
        )


def not_floating(tree: PyTree) -> list[str]:
    """Return name and dtype of every leaf that is not real floating point, such as `"n (int32)"`.

    Args:
      tree: arrays or anything with `dtype`.
    """
    leaves = jax.tree.leaves(tree)
    kinds = [leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf) for leaf in leaves]
    # Check each dtype once: thousands of leaves have only a few of them.
    other = {kind for kind in set(kinds) if not jnp.issubdtype(kind, jnp.floating)}
    if not other:
        return []
    named = zip(leaf_names(tree), leaves, kinds, strict=True)
    return [f"{name} ({jnp.result_type(x)})" for name, x, kind in named if kind in other]


def all_finite(tree: PyTree) -> jax.Array:
    """Return whether every number in a tree is finite, () bool.

    PRNG keys and integers always are. For leaves that the compiler shards the result holds for all
    of their shards.

    Args:
      tree: arrays of any dtypes.
    """
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    finite = [jnp.isfinite(x).all() for x in leaves]
    return functools.reduce(jnp.logical_and, finite, jnp.asarray(True))


def at_least_float32(dtype: Any) -> np.dtype:
    """Return float32 for half precision, else `dtype` itself (also under strict promotion)."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


def promoted_dtype(*operands: Any) -> np.dtype:
    """Return `jnp.result_type(*operands)`, of arrays or dtypes (also under strict promotion)."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*operands)


def tree_bytes(tree: PyTree) -> int:
    """Return the total bytes of all leaves (arrays, numbers or `ShapeDtypeStruct`s)."""
    return sum(
        int(np.prod(jnp.shape(leaf))) * jnp.dtype(jnp.result_type(leaf)).itemsize
        for leaf in jax.tree.leaves(tree)
    )


def cast(x: Any, dtype: Any) -> Any:
    """Return `x.astype(dtype)`."""
    if not isinstance(x, jax.Array):
        return x.astype(dtype)
    if x.dtype == dtype and not jax.typeof(x).weak_type:
        return x
    return lax.convert_element_type(x, dtype)


def add(x: Any, y: Any) -> Any:
    """Return `x + y`."""
    return lax.add(x, y) if _are_alike(x, y) else x + y


def subtract(x: Any, y: Any) -> Any:
    """Return `x - y`."""
    return lax.sub(x, y) if _are_alike(x, y) else x - y


def times(factor: float | jax.Array, x: jax.Array) -> jax.Array:
    """Return `factor * x` in x's dtype."""
    return (factor if isinstance(factor, int | float) else factor.astype(x.dtype)) * x


def cached_cast(scalar: jax.Array) -> Callable[[Any], jax.Array]:
    """Return a function from a dtype to `scalar` in that dtype, which casts once per dtype."""
    return functools.cache(lambda dtype: cast(scalar, dtype))


def reshape(x: Any, shape: tuple[int, ...]) -> Any:
    """Return `x.reshape(shape)`, for a shape without -1."""
    return lax.reshape(x, shape) if isinstance(x, jax.Array) else x.reshape(shape)


def zeros_like(x: Any) -> jax.Array:
    """Return `jnp.zeros_like(x)` of an array or type; of a tracer, unvarying over mapped axes."""
    if isinstance(x, core.Tracer):
        x = jax.typeof(x)
    elif not isinstance(x, jax.ShapeDtypeStruct):
        return jnp.zeros_like(x)
    return lax.broadcast(np.zeros([], x.dtype), x.shape, out_sharding=x.sharding)


def zero_unless(keep: jax.Array, x: jax.Array) -> jax.Array:
    """Return `x` if the () bool `keep` is True, else zeros."""
    return lax.select(keep, x, zeros_like(x))


def _are_alike(x: Any, y: Any) -> bool:
    if not (isinstance(x, jax.Array) and isinstance(y, jax.Array)):
        return False
    return x.shape == y.shape and x.dtype == y.dtype


# A parameter transform reads `y = params + updates`, computes the new parameters, and returns the
# update that leads to them. Half-precision leaves get float32 updates, so that `params + update` is
# rounded only once, by `optax.apply_updates`, to the new value.


def _wide(x: jax.Array) -> jax.Array:
    """Return `x` in at least float32."""
    return cast(x, at_least_float32(x.dtype))


@functools.partial(jax.jit, inline=True)
def params_after_update(params: PyTree, updates: PyTree) -> PyTree:
    """Return `params + updates` in at least float32, not rounded to the leaves' dtypes.

    A parameter whose update is None stays as it is, in its dtype.
    """
    new = lambda u, p: p if u is None else add(_wide(p), _wide(u))  # noqa: E731
    return jax.tree.map(new, updates, params, is_leaf=lambda u: u is None)


def widen_updates(updates: PyTree) -> PyTree:
    """Return `updates` with half-precision leaves as float32, and others unchanged."""
    return jax.tree.map(_wide, updates)


@functools.partial(jax.jit, inline=True)
def updates_to(params: PyTree, target: PyTree) -> PyTree:
    """Return the updates that lead to `target`: `target - params` in at least float32.

    `params + (target - params)` is `target` up to 1 ulp of the larger operand in float32. In half
    precision it is exactly `target` unless `params` is over 2**12 times `target`.
    """
    return jax.tree.map(lambda p, t: subtract(_wide(t), _wide(p)), params, target)


def apply_exactly(params: PyTree, updates: PyTree) -> PyTree:
    """Return `params + updates` in the leaves' dtypes, where large values may overflow.

    This is `optax.apply_updates` with explicit promotion, so it works under strict promotion too.
    """
    return jax.tree.map(lambda p, y: cast(y, p.dtype), params, params_after_update(params, updates))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightedSum:
    """The sum of trees times their weights, and the sum of these weights.

    Trees that hold it can be added leaf by leaf, as `+` does. A weight may have leading dimensions
    of the leaves, such as one of replicas.

    Attributes:
      sum: the weighted sum; leaves in at least float32.
      weight: sum of the weights, in at least float32; a leading part of the shapes of the leaves.
    """

    sum: PyTree
    weight: Any

    @classmethod
    def from_value(cls, value: PyTree, weight: jax.Array | None = None) -> Self:
        """Return one term: `value` times its weight; None counts it once.

        A value of weight 0 contributes exactly 0, even if it is NaN. Integers and booleans become
        float32.
        """
        wide = jax.tree.map(_wide_float, value)
        if weight is None:
            return cls(wide, np.ones([], np.float32))
        counts, factor = weight > 0, cached_cast(weight)

        def term(x: jax.Array) -> jax.Array:
            product = x * _expand_to_rank(factor(x.dtype), x)
            if counts.ndim == 0:
                return zero_unless(counts, product)
            return jnp.where(_expand_to_rank(counts, x), product, jnp.zeros_like(product))

        return cls(jax.tree.map(term, wide), weight)

    def __add__(self, other: "WeightedSum") -> "WeightedSum":
        return jax.tree.map(add, self, other)

    @property
    def mean(self) -> PyTree:
        """The weighted mean; zeros if the weight is 0. Leaves have the dtypes of the sum."""
        # Terms of weight 0 are zeros, and so is their sum, whatever divides it.
        divisor = cached_cast(jnp.where(self.weight > 0, self.weight, jnp.ones_like(self.weight)))
        return jax.tree.map(lambda x: x / _expand_to_rank(divisor(x.dtype), x), self.sum)


def _wide_float(x: Any) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    return cast(x, at_least_float32(x.dtype) if is_float else jnp.float32)


def _expand_to_rank(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Return a weight with leading dimensions of `x` so that it is broadcast over the others."""
    if weight.ndim == 0:
        return weight
    return weight.reshape(weight.shape + (1,) * (x.ndim - weight.ndim))
