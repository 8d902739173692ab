"""Names, sizes and kinds of the leaves of a tree."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._support.types import PyTree

_Part = TypeVar("_Part")


def leaf_names(tree: PyTree) -> list[str]:
    """Readable names of the leaves in flattening order, such as `"dense/kernel"`."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") or "(root)" for path, _ in paths]


def parts_of(tree: PyTree, kind: type[_Part]) -> list[_Part]:
    """The parts of a tree that are of class `kind`, wherever they stand in it."""
    is_one = lambda x: isinstance(x, kind)  # noqa: E731
    return [x for x in jax.tree.leaves(tree, is_leaf=is_one) if is_one(x)]


def check_arrays(owner: str, tree: PyTree) -> None:
    """Raise `ValueError` naming every leaf of `tree` that is no array or number.

    Args:
      owner: the public name that needs arrays, for the message.
      tree: arrays, numbers, anything with `dtype`; or what a model holds besides.

    Raises:
      ValueError: a leaf is a function, a string or the like.
    """
    leaves = jax.tree.leaves(tree)
    if not all(map(_is_array, leaves)):
        named = zip(leaf_names(tree), leaves, strict=True)
        wrong = [f"{name} ({type(x).__name__})" for name, x in named if not _is_array(x)]
        raise ValueError(
            f"{owner}: every leaf must be an array, got {', '.join(wrong)}. Keep the rest of a "
            "model out of the tree, as `eqx.partition(model, eqx.is_inexact_array)` does for "
            "Equinox."
        )


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") or isinstance(x, bool | int | float | complex)


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
            f"{owner} averages real floating-point leaves only, got {', '.join(wrong)}: "
            "leave other leaves out with `optax.masked(transform, mask)` around the whole chain, "
            "and give it zeros as their gradients; `js.make_train_step` takes them as "
            "`model_state`."
        )


def not_floating(tree: PyTree) -> list[str]:
    """Return name and dtype of every leaf that is not real floating point, such as `"n (int32)"`.

    Args:
      tree: arrays or anything with `dtype`.
    """
    leaves = jax.tree.leaves(tree)
    kinds = [leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf) for leaf in leaves]
    # Thousands of leaves have a few dtypes.
    other = {kind for kind in set(kinds) if not jnp.issubdtype(kind, jnp.floating)}
    if not other:
        return []
    named = zip(leaf_names(tree), leaves, kinds, strict=True)
    return [f"{name} ({jnp.result_type(x)})" for name, x, kind in named if kind in other]


def at_least_float32(dtype: Any) -> np.dtype:
    """float32 for half precision, else `dtype` itself (also under strict promotion)."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


def tree_bytes(tree: PyTree) -> int:
    """Bytes of all leaves together (arrays, numbers or `ShapeDtypeStruct`s)."""
    return sum(
        int(np.prod(jnp.shape(leaf))) * jnp.dtype(jnp.result_type(leaf)).itemsize
        for leaf in jax.tree.leaves(tree)
    )
