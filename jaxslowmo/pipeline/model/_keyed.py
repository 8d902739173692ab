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


def takes_keyword(layer: Callable[..., Any], name: str) -> bool:
    """Whether a layer takes a keyword, such as the PRNG key `key`."""
    try:
        parameters = inspect.signature(layer).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return False
    return name in parameters


def call_signature(call: Callable[..., Any], takes_state: bool) -> inspect.Signature:
    """The signature of an object that is called, with `model_state` where it takes that."""
    whole = inspect.signature(call)
    kept = [p for n, p in whole.parameters.items() if n != "model_state" or takes_state]
    return whole.replace(parameters=kept[1:])  # without `self`
