"""How the parameters of a model's layers are sharded over axes inside a stage."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..._typing import PyTree
from ...tree import leaf_names


def specs_of(params: Sequence[PyTree], param_specs: PyTree | None) -> list[PyTree]:
    """Return a tree of specs for each layer, of a prefix of them; None: whole everywhere.

    Raises:
      ValueError: specs that don't fit the parameters.
    """
    prefix = P() if param_specs is None else param_specs
    try:
        return jax.tree.broadcast(prefix, list(params), is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            "`param_specs` must be a list of one tree of PartitionSpec per layer, or a prefix of "
            f"it: {error}"
        ) from None


def specs_of_layers(params: Sequence[PyTree], param_specs: PyTree | None) -> list[list[P]]:
    """Return for each layer the specs of its leaves, without what says nothing at their end.

    Raises:
      ValueError: specs that don't fit the parameters.
    """
    found = []
    for layer, specs in zip(params, specs_of(params, param_specs), strict=True):
        named = zip(
            leaf_names(layer),
            jax.tree.leaves(layer),
            jax.tree.leaves(specs, is_leaf=_is_spec),
            strict=True,
        )
        found.append([_shortened(name, x, spec) for name, x, spec in named])
    return found


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _shortened(name: str, x: Any, spec: P) -> P:
    if len(spec) > jnp.ndim(x):
        raise ValueError(
            f"`param_specs` has {spec} for {name!r}, which has {jnp.ndim(x)} dimensions."
        )
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)
