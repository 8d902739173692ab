"""Call layers and losses: which keywords a layer takes, and how terms of a loss add up."""

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._support.types import PyTree
from ...tracing import check_loss
from ...tree import leaf_names

Metrics = dict[str, jax.Array]
Loss = jax.Array | tuple[jax.Array, Metrics]
"""() loss, or (loss, metrics)."""


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


class LayerCall:
    """A layer, and the keywords that it is called with.

    Attributes:
      takes_key: whether it takes a PRNG key, or may take one: whether a layer with `**kwargs` does
        is only known when it is called.
      takes_state: whether it takes its part of the model state.

    Args:
      layer: the function; keywords that a `functools.partial` has bound are left as they are.
      index: index of the layer in the model, for messages.

    Raises:
      ValueError: an object that cannot be called as `layer(params, x)`.
    """

    def __init__(self, layer: Any, index: int) -> None:
        self._layer = layer
        # None: the layer has `**kwargs`, so calls pass a key until one shows that it takes none.
        self._key: bool | None = False
        self.takes_key = self.takes_state = False
        if not callable(layer):
            raise ValueError(
                f"`layers` must be functions of (params, x), got {type(layer).__name__} as layer "
                f"{index}."
            )
        try:
            signature = inspect.signature(layer)
        except (TypeError, ValueError):  # builtins have no signature, and take no such keywords
            return
        bound = layer.keywords if isinstance(layer, functools.partial) else {}
        self._key = _takes(signature, "key", bound)
        self.takes_key = self._key is not False
        self.takes_state = _takes(signature, "state", bound) is True
        options = {"key": self._key, "state": self.takes_state}
        try:
            signature.bind(None, None, **{name: None for name, x in options.items() if x})
        except TypeError:
            raise ValueError(
                "`layers` must be functions that can be called as layer(params, x), got "
                f"{_name_of(layer)} as layer {index}, whose signature is {_short(signature)}."
            ) from None

    def __call__(self, params: PyTree, x: PyTree, key: Any, state: PyTree) -> Any:
        """Call the layer with the keywords that it takes, and return its result.

        Args:
          params: the parameters of the layer.
          x: the result of the previous layer, or the microbatch.
          key: the PRNG key of the layer, or None.
          state: the layer's part of the model state.
        """
        options = {"state": state} if self.takes_state else {}
        if self._key is not None:
            keyed = {"key": key} if self._key else {}
            return self._layer(params, x, **keyed, **options)
        try:
            return self._layer(params, x, key=key, **options)
        except TypeError as error:
            if not _is_key_refused(error):
                raise
        result = self._layer(params, x, **options)
        # The layer's code refuses a key, whatever the values are: later calls need not try.
        self._key = False
        return result


def _takes(signature: inspect.Signature, name: str, bound: Collection[str]) -> bool | None:
    """Return whether a function of two positional arguments also takes a keyword.

    Args:
      signature: the signature of the layer.
      name: the keyword.
      bound: the keywords that a `functools.partial` has bound.

    Returns:
      None if the keyword could only be one of `**kwargs`.
    """
    every = list(signature.parameters.values())
    positional = [p for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p for p in every if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if name in bound or name in [p.name for p in positional[:2] if p in by_name]:
        return False
    if name in [p.name for p in by_name]:
        return True
    return None if any(p.kind is p.VAR_KEYWORD for p in every) else False


def _is_key_refused(error: TypeError) -> bool:
    """Return whether a layer with `**kwargs` passed its `key` to a function that takes none.

    If a function on the way takes `key` by name, the layer does take one, and the error is a
    mistake inside of it: called again without a key it might train without dropout.
    """
    if "unexpected keyword argument 'key'" not in str(error):
        return False
    traceback = error.__traceback__ and error.__traceback__.tb_next  # the frame after `__call__`
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if "key" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            return False
        traceback = traceback.tb_next
    return True


def _name_of(layer: Any) -> str:
    return getattr(layer, "__name__", type(layer).__name__)


def _short(signature: inspect.Signature) -> str:
    """Return a signature without the types of arguments, which may be long."""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def check_leaves(argument: str, tree: PyTree) -> None:
    """Raise `ValueError` for a leaf that is not an array, a number or the type of an array.

    Args:
      argument: the name of the public argument, for the message.
      tree: the value of the argument.
    """
    leaves = jax.tree.leaves(tree)
    if all(map(_is_array, leaves)):
        return
    named = zip(leaf_names(tree), leaves, strict=True)
    name, wrong = next((name, x) for name, x in named if not _is_array(x))
    raise ValueError(
        f"`{argument}` must hold arrays alone, got {_kind(wrong)} at {name!r}: of a module pass "
        "the arrays, such as `eqx.filter(module, eqx.is_array)` or the first part of "
        "`eqx.partition(module, eqx.is_array)`."
    )


def _is_array(x: Any) -> bool:
    try:
        return _is_number(x) or jnp.issubdtype(x.dtype, jax.dtypes.extended)
    except (AttributeError, TypeError):
        return False


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


def call_signature(call: Callable[..., Any], takes_state: bool) -> inspect.Signature:
    """Return the signature of a `__call__`, with `model_state` only if `takes_state`."""
    whole = inspect.signature(call)
    kept = [p for n, p in whole.parameters.items() if n != "model_state" or takes_state]
    return whole.replace(parameters=kept[1:])  # without `self`


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

    def value(self, count: Any) -> Loss:
        """Return the loss of all examples, from sums over `count` microbatches; 0 for weight 0."""
        loss = self.total / count if self.weight is None else quotient(self.total, self.weight)
        if self.metrics is None:
            return loss
        return loss, {name: _mean(x, count) for name, x in self.metrics.items()}


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
