"""The forward pass of a torch module as a function of jax."""

from collections.abc import Callable
from typing import Any

import jax
import torch

from ._arrays import plain_tree
from ._functional import Arrays, Functional


def as_apply(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the forward pass of a torch module, to evaluate what `on_jax.as_loss` trains.

        predict = jax.jit(on_jax.as_apply(module.eval()))
        logits = predict(params, model_state, x)

    Args:
      module: module like that of `on_jax.as_loss`, in the mode, `train()` or `eval()`, to evaluate.

    Returns:
      A function `apply(params, model_state, *args, rng=None, **kwargs)` that returns, as arrays,
        the result of `module(*args, **kwargs)` with these arrays, one copy of each. Dataclasses
        become dicts. Changes of buffers are dropped.

    Raises:
      ValueError: the errors of `as_loss`; when traced, results of other types, and numbers among
        the module's attributes that have changed since the first trace. A program that `jax.jit`
        has compiled is not checked again, and keeps the numbers that it was traced with.
    """
    functional = Functional("as_apply", module)

    def apply(
        params: Arrays, model_state: Arrays, *args: Any, rng: jax.Array | None = None, **kwargs: Any
    ) -> Any:
        def run(module: torch.nn.Module, given: Any) -> Any:
            torch_args, torch_kwargs = given
            return plain_tree(module(*torch_args, **torch_kwargs), "as_apply: the result")

        return functional.call(run, params, model_state, rng, (args, kwargs))[0]

    return apply
