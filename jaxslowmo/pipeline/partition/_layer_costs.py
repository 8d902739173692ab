"""Costs of the layers of a model: parameters, and operations that the compiler counts."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._support.types import PyTree
from ...tree import check_arrays
from ..model import LayeredModel


def count_layer_params(layers: Iterable[PyTree]) -> list[int]:
    """Return the number of parameters of each layer, in elements.

        js.partition_balanced(js.pipeline.count_layer_params(params), num_stages=4)

    Args:
      layers: a sequence of one tree of parameters per layer: arrays, `jax.ShapeDtypeStruct`s,
        NumPy arrays, numbers, `nnx.state(layer, nnx.Param)`. PRNG keys, which a whole
        `nnx.state(layer)` may hold, are not counted.

    Returns:
      One int per layer; 0 for a layer without parameters.

    Raises:
      ValueError: `layers` is one tree, or a leaf is not an array.

    Communication: none; only shapes are read.
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
    """The floating-point operations of a layer for one microbatch."""

    forward: float
    backward: float  # gradients of parameters and input, without those of the forward pass

    @property
    def total(self) -> float:
        """The operations of both passes."""
        return self.forward + self.backward


def layer_flops(
    model: LayeredModel | Sequence[Callable[[PyTree, PyTree], PyTree]],
    params: Sequence[PyTree],
    microbatch: PyTree,
) -> list[LayerFlops]:
    """Return each layer's floating-point operations, from compiled programs that are not run.

        flops = js.pipeline.layer_flops(model, params, microbatch)
        parts = js.partition_by_cost([layer.total for layer in flops], num_stages=4)

    Args:
      model: a `js.LayeredModel`, whose loss is counted with its last layer; or functions
        `layer(params, x) -> x`, of which the last may include a loss.
      params: one tree per layer, of arrays or `jax.ShapeDtypeStruct`s.
      microbatch: the input of the first layer, of arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      One `LayerFlops` per layer, as the compiler of jax's default backend counts the two programs.
      It counts the body of a loop once, and of a table that is looked up only the sum of its
      gradients. Layers that are the same function of the same shapes are compiled once.

    Raises:
      ValueError: no layers, a number of parameter trees that differs from the number of layers,
        leaves that are not arrays.

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
    x, flops_of_layers, known = batch, [], {}
    for i, weights in enumerate(map(_types, params)):
        takes = model.takes[i] if isinstance(model, LayeredModel) else ()
        key = layers[i], takes, _key((weights, x)), i == 0, i == len(layers) - 1
        if key not in known:
            known[key] = _count_layer_flops(_layer_fn(model, i), weights, x, batch)
        flops, x = known[key]
        flops_of_layers.append(flops)
    return flops_of_layers


def _layer_fn(model: Any, i: int) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
    """Return layer `i` as a function (weights, x, batch); the last one includes the loss."""
    if not isinstance(model, LayeredModel):
        return lambda weights, x, batch: model[i](weights, x)
    stage, is_last = model.stage(i, i + 1), i == len(model.layers) - 1

    def compute(weights: PyTree, x: PyTree, batch: PyTree) -> PyTree:
        y = stage((weights,), x, x if i == 0 else batch)
        return y[0] if is_last and isinstance(y, tuple) else y

    return compute


def _count_layer_flops(
    fn: Callable[[PyTree, PyTree, PyTree], PyTree], weights: PyTree, x: PyTree, batch: PyTree
) -> tuple[LayerFlops, PyTree]:
    """Return the operations of a layer, and the types of its result."""
    leaves, treedef = jax.tree.flatten((weights, x))
    inexact = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]

    def forward(leaves: list[Any], batch: PyTree) -> PyTree:
        weights, x = treedef.unflatten(leaves)
        return fn(weights, x, batch)

    def both(leaves: list[Any], batch: PyTree, cotangents: list[Any]) -> Any:
        def outputs(inexact_leaves: list[Any]) -> tuple[list[Any], list[Any]]:
            whole = list(leaves)
            for i, leaf in zip(inexact, inexact_leaves, strict=True):
                whole[i] = leaf
            results = jax.tree.leaves(forward(whole, batch))
            return list(filter(_is_inexact, results)), results

        _, pull, results = jax.vjp(outputs, [leaves[i] for i in inexact], has_aux=True)
        return results, pull(cotangents)

    y = jax.eval_shape(forward, leaves, batch)
    cotangents = list(filter(_is_inexact, jax.tree.leaves(y)))
    forward_flops = _count_flops(forward, leaves, batch)
    backward_flops = _count_flops(both, leaves, batch, cotangents) - forward_flops
    return LayerFlops(forward_flops, max(0.0, backward_flops)), y


def _count_flops(fn: Callable[..., Any], *types: Any) -> float:
    costs = jax.jit(fn).lower(*types).compile().cost_analysis()
    return max(0.0, float((costs or {}).get("flops", 0.0)))


def _types(tree: PyTree) -> PyTree:
    """Return shapes and dtypes of a tree, without values and shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def _key(tree: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
