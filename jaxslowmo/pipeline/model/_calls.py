"""What layers and losses are called with, and what a loss returns and how that adds up."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._typing import PyTree

Metrics = dict[str, jax.Array]
Loss = jax.Array | tuple[jax.Array, Metrics]
"""() loss, or (loss, metrics)."""



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


class LossTerms(NamedTuple):
    """The terms of the loss of a microbatch, or their sums over several.

    Attributes:
      total: () the loss, or the sum whose quotient with the weight it is.
      weight: () the weight; None where the loss is a mean over the examples of a microbatch.
      metrics: for each name a mean, or a pair (sum, weight) of such; None where there are none.
      state: what the layers of the last stage carry to the next microbatch; None without any.
    """

    total: jax.Array
    weight: jax.Array | None
    metrics: dict[str, Any] | None
    state: PyTree = None

    def with_weights(self, fn: Callable[[jax.Array], jax.Array]) -> "LossTerms":
        """Return the terms with `fn` of every weight."""
        weight = None if self.weight is None else fn(self.weight)
        metrics = self.metrics and {
            n: (x[0], fn(x[1])) if isinstance(x, tuple) else x for n, x in self.metrics.items()
        }
        return self._replace(weight=weight, metrics=metrics)

    def value(self, count: Any) -> Loss:
        """Return the loss of all examples, of sums over `count` microbatches; 0 for weight 0."""
        loss = self.total / count if self.weight is None else quotient(self.total, self.weight)
        if self.metrics is None:
            return loss
        return loss, {name: _mean(x, count) for name, x in self.metrics.items()}


def quotient(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Return `total / weight`, and 0 for weight 0, such as that of examples that all are masked."""
    one = jnp.ones_like(weight)
    share = jnp.where(weight == 0, 0 * one, one / jnp.where(weight == 0, one, weight))
    return total * share.astype(total.dtype)


def _mean(x: Any, count: Any) -> jax.Array:
    return quotient(*x) if isinstance(x, tuple) else x / count


def loss_terms(value: Any) -> LossTerms:
    """Return the terms of what a loss function has returned.

    Raises:
      ValueError: something else than a scalar, a pair (sum, weight), or one of these with a dict of
        metrics that are such.
    """
    has_metrics = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)
    loss, metrics = value if has_metrics else (value, None)
    every = [loss, *(metrics or {}).values()]
    if not all(map(_is_scalar_or_pair, every)):
        raise ValueError(
            "`loss` must return a scalar, (sum, weight) whose quotient it is, or one of these with "
            f"a dict of metrics that are such, got {jax.tree.map(jnp.shape, value)}."
        )
    total, weight = _pair(loss) if isinstance(loss, tuple) else (loss, None)
    if metrics is not None:
        metrics = {n: _pair(x) if isinstance(x, tuple) else x for n, x in metrics.items()}
    return LossTerms(total, weight, metrics)


def _pair(x: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    """A sum and its weight as floating arrays; each may be a number or a count of integers."""
    total, weight = x
    kind = jnp.result_type(total)
    total = jnp.asarray(total, kind if jnp.issubdtype(kind, jnp.inexact) else jnp.float32)
    return total, jnp.asarray(weight, jnp.promote_types(jnp.result_type(weight), jnp.float32))


def _is_scalar_or_pair(x: Any) -> bool:
    parts: tuple[Any, ...] = x if isinstance(x, tuple) and len(x) == 2 else (x,)
    numbers = [part for part in parts if hasattr(part, "dtype") or isinstance(part, int | float)]
    return len(numbers) == len(parts) and all(jnp.shape(part) == () for part in parts)
