"""The gradient function of a loss, as a traced program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._support.types import PyTree
from ..tree import leaf_names
from ._facts import Fact, output_facts
from ._full_loss import as_full_loss


def gradient_facts(
    owner: str,
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    rng: Any,
    model_state: PyTree | None,
) -> list[Fact]:
    """A fact for the gradient of each leaf of `params`, in flattening order.

    Raises:
      ValueError: naming `owner`: a loss function that is not callable or not scalar, no parameters,
        parameters that are not real floating point.
    """
    loss = as_full_loss(loss_fn)
    leaves = jax.tree.leaves(params)
    if not leaves:
        raise ValueError(f"{owner}: `params` must have leaves, got an empty tree.")
    wrong = [
        f"{name} ({jnp.result_type(leaf)})"
        for name, leaf in zip(leaf_names(params), leaves, strict=True)
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    ]
    if wrong:
        raise ValueError(
            f"{owner}: a loss is differentiated by real floating-point `params` only, got "
            f"{', '.join(wrong)}: pass what is trained, and close over the rest."
        )

    def gradients(params: PyTree, batch: PyTree, rng: Any, model_state: PyTree) -> list[Any]:
        differentiate = jax.grad(loss, has_aux=True)
        return jax.tree.leaves(differentiate(params, batch, rng=rng, model_state=model_state)[0])

    # Shapes are all that tracing needs, so a key is described and not made.
    key = jax.eval_shape(lambda: jax.random.key(0)) if rng is None else rng
    state = {} if model_state is None else model_state
    return output_facts(jax.make_jaxpr(gradients)(params, batch, key, state))
