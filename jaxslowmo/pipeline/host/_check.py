"""Checks of the parameters that a pipeline of the host is given."""

from collections.abc import Sequence

import jax
import numpy as np

from ..._typing import PyTree

_OWNER = "HostPipeline"


def check_like(params: Sequence[PyTree], types: Sequence[PyTree]) -> None:
    """Raise `ValueError` for parameters of other trees, shapes or dtypes than `types`."""
    for i, (layer, type_) in enumerate(zip(params, types, strict=True)):
        found, wanted = (
            jax.tree.map(lambda x: f"{x.dtype.name}{list(x.shape)}", tree)
            for tree in (jax.eval_shape(lambda x: x, layer), type_)
        )
        if found != wanted:
            raise ValueError(f"{_OWNER}: `params` of layer {i} must be {wanted}, got {found}.")


def check_placed(layers: Sequence[PyTree], types: Sequence[PyTree], replicas: int) -> None:
    """Raise `ValueError` for parameters that are not stacked, or whose buffers were donated."""
    if not isinstance(layers, Sequence) or len(layers) != len(types):
        got = len(layers) if isinstance(layers, Sequence) else type(layers).__name__
        raise ValueError(
            f"{_OWNER}: `place` returns one tree per layer, {len(types)} of them, got {got}."
        )
    for i, (layer, type_) in enumerate(zip(layers, types, strict=True)):
        leaves, wanted = jax.tree.leaves(layer), jax.tree.leaves(type_)
        shapes = [(replicas, *t.shape) for t in wanted]
        if list(map(np.shape, leaves)) != shapes:
            raise ValueError(
                f"{_OWNER}: layer {i} must be stacked for {replicas} replicas, as `place` returns "
                f"it, with leaves {shapes}, got {list(map(np.shape, leaves))}."
            )
        if any(x.is_deleted() for x in leaves):
            raise ValueError(
                f"{_OWNER}: the buffers of layer {i} are gone: this state was given to a step "
                "before, which updates it in place. Go on with the state that this step returned, "
                "or make the pipeline with donate=False."
            )
