"""What each layer of a model costs: its parameters, and what the compiler counts."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._support.types import PyTree
from ...tree import check_arrays
from ..model import LayeredModel


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
            "count_layer_params: `layers` must be a sequence of one tree of parameters per layer, "
            f"got a {type(layers).__name__}."
        )
    trees = list(layers)
    for i, tree in enumerate(trees):
        check_arrays(f"count_layer_params: layer {i}", tree)
    return [sum(map(_elements, jax.tree.leaves(tree))) for tree in trees]


def _elements(leaf: Any) -> int:
    is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return 0 if is_key else math.prod(jnp.shape(leaf))


class LayerFlops(NamedTuple):
    """Floating-point operations of a layer, for the examples that it was asked for."""

    forward: float
    backward: float  # beside those of the forward pass: gradients of parameters and input

    @property
    def total(self) -> float:
        """Of both passes."""
        return self.forward + self.backward


def layer_flops(
    model: LayeredModel | Sequence[Callable[[PyTree, PyTree], PyTree]],
    params: Sequence[PyTree],
    microbatch: PyTree,
) -> list[LayerFlops]:
    """Operations of each layer, forward and backward; nothing is computed.

        flops = js.pipeline.layer_flops(model, params, microbatch)
        parts = js.partition_by_cost([layer.total for layer in flops], num_stages=4)

    Args:
      model: a `js.LayeredModel`, whose loss belongs to its last layer; or functions
        `layer(params, x) -> x`, of which the last may include a loss.
      params: one tree per layer, of arrays or `jax.ShapeDtypeStruct`s.
      microbatch: what the first layer is given, likewise.

    Returns:
      One `LayerFlops` per layer, as the compiler of jax's default backend counts the two programs.
      It counts the body of a loop once, and tables that are looked up as what adds up their
      gradients. Layers that are the same function of the same shapes are compiled once.

    Raises:
      ValueError: no layers, another number of parameters than layers, leaves that are no arrays.

    Communication: none.
    """
    layers = model.layers if isinstance(model, LayeredModel) else tuple(model)
    if not layers or len(params) != len(layers):
        raise ValueError(
            "layer_flops: `params` must be a sequence of one tree per layer, and there must be one "
            f"layer at least, got {len(params)} trees for {len(layers)} layers."
        )
    for i, tree in enumerate(params):
        check_arrays(f"layer_flops: layer {i}", tree)
    batch = _types(microbatch)
    x, found, known = batch, [], {}
    for i, weights in enumerate(map(_types, params)):
        key = layers[i], _key((weights, x)), i == 0, i == len(layers) - 1
        if key not in known:
            known[key] = _counted(_one(model, i), weights, x, batch)
        flops, x = known[key]
        found.append(flops)
    return found


def _one(model: Any, i: int) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
    """Layer `i` of (weights, x, batch), with the loss behind the last, without metrics."""
    if not isinstance(model, LayeredModel):
        return lambda weights, x, batch: model[i](weights, x)
    stage, is_last = model.stage(i, i + 1), i == len(model.layers) - 1

    def compute(weights: PyTree, x: PyTree, batch: PyTree) -> PyTree:
        y = stage((weights,), x, x if i == 0 else batch)
        return y[0] if is_last and isinstance(y, tuple) else y

    return compute


def _counted(
    fn: Callable[[PyTree, PyTree, PyTree], PyTree], weights: PyTree, x: PyTree, batch: PyTree
) -> tuple[LayerFlops, PyTree]:
    """Its operations, and the types of what it returns."""
    leaves, treedef = jax.tree.flatten((weights, x))
    moving = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]

    def forward(leaves: list[Any], batch: PyTree) -> PyTree:
        weights, x = treedef.unflatten(leaves)
        return fn(weights, x, batch)

    def both(leaves: list[Any], batch: PyTree, cotangents: list[Any]) -> Any:
        def outputs(own: list[Any]) -> tuple[list[Any], list[Any]]:
            whole = list(leaves)
            for i, leaf in zip(moving, own, strict=True):
                whole[i] = leaf
            found = jax.tree.leaves(forward(whole, batch))
            return list(filter(_is_inexact, found)), found

        _, pull, found = jax.vjp(outputs, [leaves[i] for i in moving], has_aux=True)
        return found, pull(cotangents)

    y = jax.eval_shape(forward, leaves, batch)
    cotangents = list(filter(_is_inexact, jax.tree.leaves(y)))
    ahead = _operations(forward, leaves, batch)
    behind = _operations(both, leaves, batch, cotangents) - ahead
    return LayerFlops(ahead, max(0.0, behind)), y


def _operations(fn: Callable[..., Any], *types: Any) -> float:
    costs = jax.jit(fn).lower(*types).compile().cost_analysis()
    return max(0.0, float((costs or {}).get("flops", 0.0)))


def _types(tree: PyTree) -> PyTree:
    """Without values and layouts."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def _key(tree: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
