"""Why a batch cannot be split leaf by leaf: wrong dtypes, and containers with other leaves."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._support.types import PyTree
from ..mesh import is_shared_leaf
from ..tree import leaf_names


def array_problem(batch: PyTree) -> str | None:
    """Return an error text if jax does not take a NumPy leaf of a batch; else None."""
    wrong = [_is_other_array(x) for x in jax.tree.leaves(batch)]
    if not any(wrong):  # names cost more than the rest
        return None
    at = wrong.index(True)
    name, dtype = leaf_names(batch)[at], jax.tree.leaves(batch)[at].dtype
    instead = "leave it out of the batch, or encode it as numbers"
    if dtype.kind in "iufc":
        instead = "give it in the byte order of this machine, x.astype(x.dtype.newbyteorder('='))"
    return (
        "`batch`: every leaf must be an array of numbers or bools that jax takes, got "
        f"{name!r} of dtype {dtype}: {instead}."
    )


def _is_other_array(x: Any) -> bool:
    """Return whether `x` is an array of NumPy that jax does not take."""
    return isinstance(x, np.ndarray) and not _is_jax_dtype(x.dtype)


def _is_jax_dtype(dtype: np.dtype) -> bool:
    # bfloat16 and the like are of kind V, and numbers to jax alone.
    is_number = jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_
    return is_number and dtype.isnative


def container_problem(batch: PyTree) -> str | None:
    """Return an error text if a container's leaves cannot be split one by one; else None.

    A class of containers that is registered with jax may mean more by its leaves than that each
    counts examples: those of a sparse matrix count its elements, and its shape, which is no leaf,
    stays whole. Tuples, lists and mappings are taken by their leaves.
    """
    containers = list(_containers(batch))
    if not containers:
        return None
    outside = _sizes(
        jax.tree.map(lambda x: None if _is_container(x) else x, batch, is_leaf=_is_container)
    )
    for name, node in containers:
        what = f"`batch`: {name!r} is a {type(node).__name__}, "
        shapes = {np.shape(x) for x in jax.tree.leaves(node) if not is_shared_leaf(x)}
        if isinstance(shape := getattr(node, "shape", None), tuple):
            shapes.add(shape)
        if named := shapes & {*_static_tuples(jax.tree.structure(node))}:
            return f"{what}which keeps the shape {min(named)} beside its leaves. {_INSTEAD}"
        sizes = _sizes(node)
        if len(sizes) > 1 or (outside and not sizes <= outside):
            beside = f", beside leaves of {_format_sizes(outside)} in the batch" if outside else ""
            have = f"whose leaves have leading dimensions of {_format_sizes(sizes)}"
            return f"{what}{have}{beside}. {_INSTEAD}"
    return None


def _sizes(tree: PyTree) -> set[int]:
    """Return the leading dimensions of the leaves that are split."""
    return {np.shape(x)[0] for x in jax.tree.leaves(tree) if not is_shared_leaf(x)}


def _format_sizes(sizes: set[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))


_INSTEAD = (
    "Each replica gets a part of every leaf, and such parts are no part of the container. Give "
    "arrays whose leading dimension counts examples, such as a dense array or "
    "`js.embedding.bags`; what all examples share stands in the loss function, or in arrays with "
    "a leading dimension of 1."
)


def _is_container(x: Any) -> bool:
    is_plain = x is None or isinstance(x, dict | tuple | list | np.ndarray | jax.Array | Mapping)
    return not is_plain and not jax.tree_util.all_leaves([x])


def _containers(batch: PyTree) -> Iterator[tuple[str, Any]]:
    """Yield name and container for each outermost container of a registered class."""
    if any(map(_is_container, jax.tree.leaves(batch, is_leaf=_is_container))):
        for path, x in jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_container):
            if _is_container(x):
                yield jax.tree_util.keystr(path, simple=True, separator="/") or "(root)", x


def _static_tuples(structure: Any) -> Iterator[tuple[int, ...]]:
    """Yield the tuples of integers in the static parts of a tree."""
    data = structure.node_data()
    pending = [] if data is None else [data[1]]
    while pending:
        x = pending.pop()
        if isinstance(x, dict):
            pending.extend(x.values())
        elif isinstance(x, tuple | list):
            if x and all(isinstance(n, int | np.integer) for n in x):
                yield tuple(map(int, x))
            pending.extend(x)
    for child in structure.children():
        yield from _static_tuples(child)
