"""How many parameters each layer has."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..._support.types import PyTree
from ...tree import check_arrays

_OWNER = "count_layer_params"


def count_layer_params(layers: Iterable[PyTree]) -> list[int]:
    """Elements of the parameters of each layer.

        js.partition_balanced(js.pipeline.count_layer_params(params), num_stages=4)

    Args:
      layers: a sequence of one tree of parameters per layer: arrays, `jax.ShapeDtypeStruct`s,
        NumPy arrays, numbers, `nnx.state(layer, nnx.Param)`. PRNG keys, such as a whole
        `nnx.state(layer)` may hold, are no parameters and count nothing.

    Returns:
      One int per layer; 0 for a layer without parameters.

    Raises:
      ValueError: `layers` is one tree, or a leaf is no array.

    Communication: none; nothing is read but shapes.
    """
    if isinstance(layers, Mapping) or hasattr(layers, "shape") or not isinstance(layers, Iterable):
        raise ValueError(
            f"{_OWNER}: `layers` must be a sequence of one tree of parameters per layer, got a "
            f"{type(layers).__name__}."
        )
    trees = list(layers)
    for i, tree in enumerate(trees):
        check_arrays(f"{_OWNER}: layer {i}", tree)
    return [sum(map(_elements, jax.tree.leaves(tree))) for tree in trees]


def _elements(leaf: Any) -> int:
    is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return 0 if is_key else math.prod(jnp.shape(leaf))
