"""Optimizers that see names, shapes and ranks of leaves, each with rates that make small steps."""

from typing import Any

import jax
import optax

# A large epsilon: Adam turns the rounding of a gradient near zero into a whole step.
_EPS = 1e-2


def names(tree: Any) -> Any:
    """Return the tree with the path of each leaf in its place."""
    return jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), tree)


def is_no_bias(tree: Any) -> Any:
    """Return a mask of the leaves whose names do not hold "bias"."""
    return jax.tree.map(lambda name: "bias" not in name, names(tree))


def _kinds(tree: Any) -> Any:
    def kind(name: str) -> str:
        return next((kind for kind in _of_kinds() if kind in name), "rest")

    return jax.tree.map(kind, names(tree))


def _of_kinds() -> dict[str, optax.GradientTransformation]:
    """Return optimizers whose states have other forms: factors, as the leaf, none of its own."""
    adafactor = optax.adafactor(0.005, min_dim_size_to_factor=4, eps=1e-3)
    return {"table": adafactor, "up": optax.lamb(0.005, eps=_EPS), "rest": _adam()}


def _adam(**options: Any) -> optax.GradientTransformation:
    return optax.adamw(0.005, eps=_EPS, weight_decay=0.3, **options)


def per_leaf() -> dict[str, optax.GradientTransformation]:
    """Return optimizers whose result for a leaf depends on this leaf."""
    return {
        "sgd": optax.sgd(0.02, momentum=0.9, nesterov=True),
        "adamw": _adam(),
        "mask_by_name": _adam(mask=is_no_bias),
        "partition": optax.partition(_of_kinds(), _kinds),
        "inject_hyperparams": optax.inject_hyperparams(optax.adam)(0.005, eps=_EPS),
    }
