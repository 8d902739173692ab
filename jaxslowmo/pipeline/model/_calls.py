"""Which keywords layers take, which leaves they may have, and how terms of a loss add up."""

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._support.types import PyTree
from ...tracing import Quotient, check_loss
from ...tree import leaf_names

Metrics = dict[str, jax.Array]


class Loss(NamedTuple):
    """The loss of a batch, and its metrics.

    Attributes:
      value: () the loss.
      weight: () the sum of the weights of all examples; None where the loss is a mean over them.
      metrics: maps names to scalars; None if the loss function returns none.
    """

    value: jax.Array
    weight: jax.Array | None
    metrics: Metrics | None

    def returned(self, state: PyTree = None, *, weighted: bool) -> Any:
        """Return what a loss function returns: loss, (loss, metrics) or (loss, (metrics, state)).

        Args:
          state: the new model state; None for models without.
          weighted: whether a loss with a weight is returned as a `Quotient`.
        """
        loss: Any = self.value
        if weighted and self.weight is not None:
            loss = Quotient(self.value, self.weight)
        if state is not None:
            return loss, (self.metrics or {}, state)
        return loss if self.metrics is None else (loss, self.metrics)


class Keyed(NamedTuple):
    """A microbatch, and the PRNG key for its layers.

    Attributes:
      batch: the microbatch.
      key: the PRNG key of this microbatch.
      shift: () int32, added to the index of each layer: programs that compute several equal stages
        of a model by one branch need it for the key of each.
    """

    batch: PyTree
    key: jax.Array
    shift: Any = 0

    def layer_key(self, layer: int) -> jax.Array:
        """Return the key of the layer with this index in the model."""
        return jax.random.fold_in(self.key, layer + self.shift)


def keyed_microbatch(batch: PyTree, rng: jax.Array | None, index: Any, shift: Any = 0) -> PyTree:
    """Pair microbatch number `index` with its key; return it as it is if `rng` is None."""
    return batch if rng is None else Keyed(batch, jax.random.fold_in(rng, index), shift)


KEYWORDS = ("key", "state")
"""The arguments that a layer may take besides its parameters and its input."""

Takes = Collection[str] | Sequence[Collection[str] | None] | None
"""Names out of `KEYWORDS`: for all layers, or for each; None: those in the layer's signature."""


def takes_of(layers: Sequence[Any], takes: Takes) -> tuple[tuple[str, ...], ...]:
    """Return the keywords that each layer is called with.

    Raises:
      ValueError: `takes` of another form; a layer that cannot be called so.
    """
    each: Any = [takes] * len(layers) if takes is None or _are_names(takes) else takes
    is_form = isinstance(each, list | tuple) and len(each) == len(layers)
    if not is_form or not all(x is None or _are_names(x) for x in each):
        raise ValueError(
            "`takes` must be names out of 'key' and 'state' for all layers, such as ('key',), or a "
            f"list of one such tuple or None for each of the {len(layers)} layers, got {takes!r}."
        )
    return tuple(_taken(i, *one) for i, one in enumerate(zip(layers, each, strict=True)))


def _are_names(x: Any) -> bool:
    is_collection = isinstance(x, list | tuple | set | frozenset)
    return is_collection and all(isinstance(name, str) and name in KEYWORDS for name in x)


def _taken(index: int, layer: Any, said: Collection[str] | None) -> tuple[str, ...]:
    """Return the keywords of layer `index`: those in `said`; None: those that its signature has."""
    if not callable(layer):
        raise ValueError(
            f"`layers` must be functions of (params, x), got {type(layer).__name__} as layer "
            f"{index}."
        )
    try:
        signature = inspect.signature(layer)
    except (TypeError, ValueError):  # builtins have no signature, and take no such keywords
        return tuple(name for name in KEYWORDS if name in (said or ()))
    has = _names_in(signature, layer) if said is None else said
    taken = tuple(name for name in KEYWORDS if name in has)
    try:
        signature.bind(None, None, **dict.fromkeys(taken))
    except TypeError:
        call = ", ".join(["params", "x", *(f"{name}={name}" for name in taken)])
        raise ValueError(
            f"`{'layers' if said is None else 'takes'}` must be such that layer {index} can be "
            f"called as layer({call}), got {_name_of(layer)}, whose signature is "
            f"{_short(signature)}."
        ) from None
    return taken


def _names_in(signature: inspect.Signature, layer: Any) -> list[str]:
    """Return the names of parameters behind the first two that `functools.partial` hasn't bound."""
    bound = layer.keywords if isinstance(layer, functools.partial) else {}
    every = signature.parameters.values()
    positional = [p.name for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p.name for p in every if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in named if name not in (*positional[:2], *bound)]


def _name_of(layer: Any) -> str:
    return getattr(layer, "__name__", type(layer).__name__)


def _short(signature: inspect.Signature) -> str:
    """Return a signature without the types of arguments, which may be long."""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def check_leaves(argument: str, tree: PyTree, *, keys: bool = False) -> None:
    """Raise `ValueError` for a leaf that is not an array, a number or the type of an array.

    Args:
      argument: the name of the public argument, for the message.
      tree: the value of the argument.
      keys: whether leaves may also be PRNG keys.
    """
    leaves = jax.tree.leaves(tree)
    wrong = [i for i, x in enumerate(leaves) if not (_is_number(x) or (keys and _is_key(x)))]
    if not wrong:
        return
    x, name = leaves[wrong[0]], leaf_names(tree)[wrong[0]]
    hint = (
        "pass PRNG keys as `rng`, of which each layer that takes `key` gets its own."
        if _is_key(x)
        else "of a module pass the arrays, such as `eqx.filter(module, eqx.is_array)` or the first "
        "part of `eqx.partition(module, eqx.is_array)`."
    )
    raise ValueError(f"`{argument}` must hold arrays alone, got {_kind(x)} at {name!r}: {hint}")


def _is_key(x: Any) -> bool:
    is_of_jax = isinstance(x, jax.Array | jax.ShapeDtypeStruct)
    return is_of_jax and jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _is_number(x: Any) -> bool:
    """Return whether `x` is a number, an array of numbers or booleans, or the type of one."""
    if isinstance(x, bool | int | float | complex):
        return True
    try:
        dtype = np.dtype(x.dtype)
    except (AttributeError, TypeError):  # not an array, a PRNG key, or from another library
        return False
    return dtype == np.bool_ or jnp.issubdtype(dtype, np.number)


def _kind(x: Any) -> str:
    """Return dtype and shape of an array, or the name of the class of any other object."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}{list(x.shape)}"
    return "None" if x is None else type(x).__name__


def type_text(x: Any) -> str:
    """Return dtype and shape of an array, a number or the type of an array."""
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}"


class LossTerms(NamedTuple):
    """The terms of the loss of a microbatch, or their sums over several.

    Attributes:
      total: () the loss, or with a weight the sum that is divided by the weight.
      weight: () the weight; None where the loss is a mean over the examples of a microbatch.
      metrics: maps a name to a mean or to a pair (sum, weight); None if the loss has no metrics.
      state: model state of the last stage's layers for the next microbatch; None without any.
    """

    total: jax.Array
    weight: jax.Array | None
    metrics: dict[str, Any] | None
    state: PyTree = None

    def with_weights(self, fn: Callable[[jax.Array], jax.Array]) -> "LossTerms":
        """Return the terms with `fn` applied to every weight."""
        weight = None if self.weight is None else fn(self.weight)
        metrics = self.metrics and {
            n: (x[0], fn(x[1])) if isinstance(x, tuple) else x for n, x in self.metrics.items()
        }
        return self._replace(weight=weight, metrics=metrics)

    def loss(self, count: Any) -> Loss:
        """Return the loss of all examples, from sums over `count` microbatches; 0 for weight 0."""
        value = self.total / count if self.weight is None else quotient(self.total, self.weight)
        metrics = self.metrics and {name: _mean(x, count) for name, x in self.metrics.items()}
        return Loss(value, self.weight, metrics)


def quotient(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Return `total / weight`, and 0 for weight 0, such as if all examples are masked."""
    one = jnp.ones_like(weight)
    share = jnp.where(weight == 0, 0 * one, one / jnp.where(weight == 0, one, weight))
    return total * share.astype(total.dtype)


def _mean(x: Any, count: Any) -> jax.Array:
    return quotient(*x) if isinstance(x, tuple) else x / count


def loss_terms(value: Any) -> LossTerms:
    """Return the terms of the value that a loss function has returned.

    Raises:
      ValueError: a value that is not a scalar, a pair (sum, weight), or one of these with a dict
        of metrics of these two forms; a loss, or the sum of one, that is not floating.
    """
    has_metrics = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)
    loss, metrics = value if has_metrics else (value, None)
    every = [loss, *(metrics or {}).values()]
    if not all(map(_is_scalar_or_pair, every)):
        kinds = jax.tree.map(_kind, value, is_leaf=lambda x: x is None)
        raise ValueError(
            "`loss` must return a scalar, (sum, weight) whose quotient it is, or one of these with "
            f"a dict of metrics that are such, got {kinds}."
        )
    check_loss("loss", loss[0] if isinstance(loss, tuple) else loss)
    total, weight = _pair(loss) if isinstance(loss, tuple) else (_floating(loss), None)
    if metrics is not None:
        metrics = {
            n: _pair(x) if isinstance(x, tuple) else _floating(x) for n, x in metrics.items()
        }
    return LossTerms(total, weight, metrics)


def _pair(x: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    """Return a sum and its weight as floating arrays; each may be a number or an integer count."""
    total, weight = x
    weight = jnp.asarray(weight, jnp.promote_types(jnp.result_type(weight), jnp.float32))
    return _floating(total), weight


def _floating(x: Any) -> jax.Array:
    """Return a scalar as an array: of its own dtype if that is inexact, else float32."""
    kind = jnp.result_type(x)
    is_kept = jnp.issubdtype(kind, jnp.inexact) and type(x) is not float
    return jnp.asarray(x, kind if is_kept else jnp.float32)


def _is_scalar_or_pair(x: Any) -> bool:
    parts: tuple[Any, ...] = x if isinstance(x, tuple) and len(x) == 2 else (x,)
    return all(_is_number(part) and jnp.shape(part) == () for part in parts)
