"""`typed_keys`: a loss function whose model state holds raw PRNG keys, with typed ones instead.

Keras and `jax.random.PRNGKey` make raw keys, two numbers of uint32, or four with the generators
"rbg" and "unsafe_rbg". By the type of a key the step knows that each replica and device needs one
of its own and that keys are never averaged, and a checkpoint what to give to other replicas.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .._support.types import PyTree
from ..mesh import default_generator
from ..tracing import FullLoss, as_full_loss
from ..transform import LossProgram
from ..tree import leaf_names, type_text

_THREEFRY_WORDS, _RBG_WORDS = 2, 4  # uint32 in a key; no generator of jax has another number


def typed_keys(loss_fn: Callable[..., Any]) -> "TypedKeys":
    """Wrap a loss function that uses raw PRNG keys so that its model state holds typed keys.

        step = js.make_train_step(js.typed_keys(keras_loss), optimizer, mesh=mesh)
        state = step.init(params, model_state=raw)

    `step.init` makes a typed key of every uint32 leaf of shape (2,) or (4,) in the model state.
    `loss_fn` receives it as it was given, and returns it so or typed. Arrays of several keys, of
    shape (n, 2), are not recognised: use typed keys there.

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
        """Return `model_state` with a typed key in place of every raw one."""
        typed = jax.tree.map(lambda x: _typed(x) if is_raw_key(x) else x, model_state)
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
        if any(map(is_raw_key, leaves)):
            pairs = zip(leaf_names(model_state), leaves, strict=True)
            name, raw = next((name, x) for name, x in pairs if is_raw_key(x))
            raise ValueError(
                f"js.typed_keys: keys in `model_state` must be typed, and {name} is "
                f"{type_text(raw)}, so all replicas would draw the same: make the state with "
                "step.init of this step."
            )
        raw = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, model_state)
        loss, (metrics, new) = loss_fn(params, batch, rng=rng, model_state=raw, embedded=embedded)
        if jax.tree.structure(new) == jax.tree.structure(raw):  # else the step raises an error
            pairs = zip(leaf_names(new), jax.tree.leaves(new), leaves, strict=True)
            new = jax.tree.structure(new).unflatten([_as_before(*each) for each in pairs])
        return loss, (metrics, new)


def _as_before(name: str, x: Any, old: Any) -> Any:
    """Return `x`, as a typed key if `old` is one; raise `ValueError` if `x` cannot be one."""
    if not is_key(old) or (isinstance(x, jax.Array) and is_key(x)):
        return x
    if not is_raw_key(x) or jnp.shape(x) != jax.random.key_data(old).shape:
        raise ValueError(
            f"js.typed_keys: `loss_fn` must return a key in place of the key {name} of "
            f"`model_state`, as {type_text(jax.random.key_data(old))} or typed, got {type_text(x)}."
        )
    return jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(old))


def is_raw_key(x: Any, *, stacked: bool = False) -> bool:
    """Return whether an array may be a raw PRNG key of jax, or one of each replica if `stacked`."""
    shapes = [(_THREEFRY_WORDS,), (_RBG_WORDS,)]
    return jnp.shape(x)[stacked:] in shapes and jnp.result_type(x) == jnp.uint32


def _typed(x: Any) -> jax.Array:
    # Two numbers are a key of threefry, whatever the default is. Four do not tell which of two.
    of_four = default_generator() if default_generator() == "unsafe_rbg" else "rbg"
    impl = "threefry2x32" if jnp.shape(x) == (_THREEFRY_WORDS,) else of_four
    return jax.random.wrap_key_data(jnp.asarray(x), impl=impl)


def is_key(x: Any) -> bool:
    """Return whether an array holds typed PRNG keys."""
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
