"""Optimizers that see names, shapes and ranks of leaves, each with rates that make small steps."""

from typing import Any

import jax
import optax

import jaxslowmo as js
from support.promotion import promoting

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


def per_leaf(params: Any) -> dict[str, optax.GradientTransformation]:
    """Return optimizers whose result for a leaf depends on this leaf; one mask is of `params`."""
    contrib = optax.contrib
    return {
        "sgd": optax.sgd(0.02, momentum=0.9, nesterov=True),
        "adamw": _adam(),
        "mask_by_ndim": _adam(mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
        "mask_by_name": _adam(mask=is_no_bias),
        "mask_as_tree": _adam(mask=is_no_bias(params)),
        "partition": optax.partition(_of_kinds(), _kinds),
        "inject_hyperparams": optax.inject_hyperparams(optax.adam)(0.005, eps=_EPS),
        "multi_steps": promoting(optax.MultiSteps(_adam(), 3).gradient_transformation()),
        "muon": contrib.muon(0.002, ns_steps=2, adam_eps_root=1e-4),
        "lamb": optax.lamb(0.005, eps=_EPS),
        "lars": optax.lars(0.02),
        "adafactor": optax.adafactor(0.005, min_dim_size_to_factor=4, eps=1e-3),
        "schedule_free": contrib.schedule_free_adamw(0.005, eps=_EPS),
        "sm3": optax.sm3(0.01),
        "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.02)),
        "lookahead_of_rates": promoting(
            optax.adam(optax.cosine_decay_schedule(0.005, 20), eps=_EPS)
        ),
    }


def of_all_leaves() -> dict[str, optax.GradientTransformation]:
    """Return optimizers whose result for a leaf depends on others, unaware of stages."""
    contrib = optax.contrib
    return {
        "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
        "a_large_norm": optax.chain(optax.clip_by_global_norm(1e4), optax.sgd(0.1)),
        "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
        "prodigy": promoting(contrib.prodigy()),
        "hidden_clip": optax.chain(js.clip_by_global_norm(0.1), optax.adam(0.1)),
        "flatten": optax.flatten(optax.adam(0.1)),  # does not, but that is not proved
        "normalize": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
        "skip_not_finite": promoting(
            optax.MultiSteps(
                optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite
            ).gradient_transformation()
        ),
        "hidden_reduction": optax.chain(
            js.all_reduce_gradients("replica"), optax.clip_by_global_norm(0.1), optax.sgd(0.1)
        ),
    }
