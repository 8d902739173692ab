"""`typed_keys`: a loss function whose model state holds raw PRNG keys, with typed ones instead.

Keras and `jax.random.PRNGKey` make raw keys, pairs of uint32. By the type of a key the step knows
that each replica and device needs one of its own and that keys are never averaged, and a checkpoint
knows what to give to other replicas.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .._support.types import PyTree
from ..tracing import FullLoss, as_full_loss
from ..transform import LossProgram
from ..tree import leaf_names

_IMPL = "threefry2x32"  # its keys are two numbers, whatever jax's default implementation is


def typed_keys(loss_fn: Callable[..., Any]) -> "TypedKeys":
    """Wrap a loss function that uses raw PRNG keys so that its model state holds typed keys.

        step = js.make_train_step(js.typed_keys(keras_loss), optimizer, mesh=mesh)
        state = step.init(params, model_state=raw)

    `step.init` makes a typed key of every uint32 leaf of shape (2,) in the model state. `loss_fn`
    receives it as such a pair, and returns it as one or typed. Arrays of several keys, of shape
    (n, 2), are not recognised: use typed keys there.

    Args:
      loss_fn: any loss function that `js.make_train_step` takes.

    Returns:
      A loss function `(params, batch, *, rng, model_state) -> (loss, (metrics, model_state))`.

    Raises:
      ValueError: at construction, `loss_fn` is not callable; when traced, its model state still
        holds a raw key, as `js.TrainState.create` leaves it, or `loss_fn` returns none for a key.
    """
    return TypedKeys(loss_fn)


class TypedKeys(LossProgram):
    """The loss function that `typed_keys` returns."""

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self._program = program = LossProgram.of(loss_fn)
        self._loss = as_full_loss(loss_fn)
        self.weighted = partial(self._computed, as_full_loss(program.weighted or loss_fn))
        self.param_specs, self.param_types = program.param_specs, program.param_types
        self.dispatch, self.check_mesh = program.dispatch, program.check_mesh
        self.before_run, self.params_form = program.before_run, program.params_form
        self.tied_transform = program.tied_transform

    def model_state_form(self, model_state: PyTree) -> PyTree:
        """Return `model_state` with a typed key in place of every uint32 leaf of shape (2,)."""
        typed = jax.tree.map(lambda x: _typed(x) if _is_raw_key(x) else x, model_state)
        return self._program.model_state_form(typed)

    def __call__(
        self,
        params: PyTree,
        batch: PyTree,
        *,
        rng: Any = None,
        model_state: PyTree = None,
        embedded: PyTree = None,
    ) -> Any:
        """Compute the loss with raw keys in place of the typed ones in `model_state`."""
        arguments = {"rng": rng, "model_state": model_state, "embedded": embedded}
        return self._computed(self._loss, params, batch, **arguments)

    def _computed(
        self,
        loss_fn: FullLoss,
        params: PyTree,
        batch: PyTree,
        *,
        rng: Any,
        model_state: PyTree,
        embedded: PyTree = None,
    ) -> Any:
        leaves = jax.tree.leaves(model_state)
        if any(map(_is_raw_key, leaves)):
            pairs = zip(leaf_names(model_state), leaves, strict=True)
            name = next(name for name, x in pairs if _is_raw_key(x))
            raise ValueError(
                f"js.typed_keys: keys in `model_state` must be typed, and {name} is uint32[2], so "
                "all replicas would draw the same: make the state with step.init of this step."
            )
        raw = jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, model_state)
        loss, (metrics, new) = loss_fn(params, batch, rng=rng, model_state=raw, embedded=embedded)
        if jax.tree.structure(new) == jax.tree.structure(raw):  # else the step raises an error
            pairs = zip(leaf_names(new), jax.tree.leaves(new), leaves, strict=True)
            new = jax.tree.structure(new).unflatten([_as_before(*each) for each in pairs])
        return loss, (metrics, new)


def _as_before(name: str, x: Any, old: Any) -> Any:
    """Return `x`, as a typed key if `old` is one; raise `ValueError` if `x` cannot be one."""
    if not _is_key(old) or (isinstance(x, jax.Array) and _is_key(x)):
        return x
    if not _is_raw_key(x):
        shape = ",".join(map(str, jnp.shape(x)))
        raise ValueError(
            f"js.typed_keys: `loss_fn` must return a key in place of the key {name} of "
            f"`model_state`, as uint32[2] or typed, got {jnp.result_type(x)}[{shape}]."
        )
    return _typed(x)


def _is_raw_key(x: Any) -> bool:
    return jnp.shape(x) == (2,) and jnp.result_type(x) == jnp.uint32


def _typed(x: Any) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(x), impl=_IMPL)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
