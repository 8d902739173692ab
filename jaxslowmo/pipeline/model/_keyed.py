"""PRNG keys of layers: the same whichever stage computes them, forward and backward."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ..._typing import PyTree


class Keyed(NamedTuple):
    """A microbatch, and the key that its layers draw from.

    Attributes:
      batch: the microbatch.
      key: of this microbatch.
      shift: () int32, added to the index of each layer; programs that compute several equal stages
        of a model by one branch tell them apart by it.
    """

    batch: PyTree
    key: jax.Array
    shift: Any = 0

    def layer_key(self, layer: int) -> jax.Array:
        """The key of a layer of the model, by its index."""
        return jax.random.fold_in(self.key, layer + self.shift)


def keyed_microbatch(batch: PyTree, rng: jax.Array | None, index: Any, shift: Any = 0) -> PyTree:
    """Microbatch number `index` with its own key, or as it is where there are no keys."""
    return batch if rng is None else Keyed(batch, jax.random.fold_in(rng, index), shift)


def takes_key(layer: Callable[..., Any]) -> bool:
    """Whether a layer takes a PRNG key, as the keyword `key`."""
    try:
        parameters = inspect.signature(layer).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return False
    return "key" in parameters
