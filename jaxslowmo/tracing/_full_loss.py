"""Loss functions of several signatures as one."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._support.types import PyTree

FullLoss = Callable[..., tuple[jax.Array, tuple[dict[str, jax.Array], PyTree]]]


def as_full_loss(loss_fn: Callable[..., Any]) -> FullLoss:
    """`loss_fn` as `(params, batch, *, rng, model_state) -> (loss, (metrics, model_state))`.

    With `embedded=` it is handed on, what was looked up in tables for the batch.

    Raises:
      ValueError: not callable; at trace time, model state given to a function that takes none, or
        results of another shape.
    """
    if not callable(loss_fn):
        raise ValueError(f"`loss_fn` must be callable, got {type(loss_fn).__name__}.")
    parameters = inspect.signature(loss_fn).parameters.values()
    names = {p.name for p in parameters}
    any_keyword = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    takes_rng = any_keyword or "rng" in names
    takes_state = any_keyword or "model_state" in names

    takes_embedded = any_keyword or "embedded" in names

    def full(
        params: PyTree,
        batch: PyTree,
        *,
        rng: jax.Array,
        model_state: PyTree,
        embedded: PyTree | None = None,
    ):
        if jax.tree.leaves(model_state) and not takes_state:
            raise ValueError(
                "`loss_fn` must take `model_state` as a keyword, since the train state has one."
            )
        keywords: dict[str, Any] = {"rng": rng} if takes_rng else {}
        if takes_state:
            keywords["model_state"] = model_state
        if embedded is not None:
            if not takes_embedded:
                raise ValueError(
                    "`loss_fn` must take `embedded` as a keyword, what was looked up by feature, "
                    "since the step was given `embeddings`."
                )
            keywords["embedded"] = embedded
        out = loss_fn(params, batch, **keywords)
        loss, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, {})
        if isinstance(aux, tuple) and len(aux) == 2:
            metrics, model_state = aux
        else:
            metrics = aux
        if isinstance(loss, tuple) or jnp.shape(loss) != () or not isinstance(metrics, dict):
            raise ValueError(
                "`loss_fn` must return a scalar loss, (loss, metrics dict) or (loss, (metrics "
                f"dict, model_state)), got {jax.tree.map(jnp.shape, out)}."
            )
        return loss, (metrics, model_state)

    return full
