"""A torch module, its forward pass and its loss, as functions of jax."""

from collections.abc import Callable
from typing import Any

import jax
import torch

from jaxslowmo.tracing import LossProgram

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


TorchLoss = Callable[[torch.nn.Module, Any], Any]
LossFn = Callable[..., tuple[jax.Array, tuple[dict[str, Any], Arrays]]]


def as_loss(module: torch.nn.Module, loss: TorchLoss) -> tuple[LossFn, Arrays, Arrays]:
    """Convert a torch module and its loss to a loss function for `js.make_train_step`.

        def loss(module, batch):
            return F.cross_entropy(module(batch["x"]), batch["y"])

        loss_fn, params, model_state = on_jax.as_loss(module, loss)
        step = js.make_train_step(loss_fn, optax.sgd(0.1), sync=js.slowmo(...), mesh=mesh)
        state = step.init(params, model_state=model_state)

    The module keeps its tensors; `on_jax.load_back` writes the trained ones into it. The first step
    traces the module, in the mode, `train()` or `eval()`, in which it is now. Numbers among its
    attributes (a temperature) are those of the first trace: a step raises an error if they have
    changed since, which your own `jax.jit(loss_fn)` cannot notice. Random numbers, such as those of
    dropout, come from `rng`.

    Args:
      module: any torch module whose forward pass torchax supports, on any device.
      loss: function `loss(module, batch) -> loss` or `(loss, metrics)`, written in torch: a scalar
        tensor, the mean over the batch, and a dict of scalars. `batch` is the step's batch, with
        tensors in place of arrays; jax's integers of 32 bits are `torch.int64`, unless it has 64.

    Returns:
      `(loss_fn, params, model_state)`. params: the parameters that require gradients, arrays by
        their name in `module.named_parameters()`, tied ones once. model_state: frozen parameters
        and all buffers by name, {} without any; arrays of torch's shapes and dtypes, but of 32 bits
        if jax has no 64. loss_fn: `(params, batch, *, rng=None, model_state={}) -> (loss,
        (metrics, model_state))`.

    Raises:
      ValueError: no module, or one with tensors that jax cannot hold, all named; a loss that is not
        callable. When traced: a loss that is no scalar floating tensor, metrics that are no dict of
        scalars, random numbers without a key, other names in `params` or `model_state`, changed
        tensors that would be lost, a number that forward changes, operations that jax lacks.
    """
    functional = Functional("as_loss", module)
    if not callable(loss):
        raise ValueError(f"as_loss: `loss` must be callable, got {type(loss).__name__}.")
    return _LossOfModule(functional, loss), *functional.values()


class _LossOfModule(LossProgram):
    """The loss function that `as_loss` returns."""

    def __init__(self, functional: Functional, loss: TorchLoss) -> None:
        self._functional, self._loss = functional, loss

    def before_run(self) -> None:
        """Raise `ValueError` if a number among the module's attributes has changed."""
        self._functional.refuse_changed_numbers()

    def __call__(
        self,
        params: Arrays,
        batch: Any,
        *,
        rng: jax.Array | None = None,
        model_state: Arrays | None = None,
    ) -> tuple[jax.Array, tuple[dict[str, Any], Arrays]]:
        """Compute the loss, the metrics and the model state of a batch."""

        def run(module: torch.nn.Module, batch: Any) -> Any:
            return _loss_and_metrics(self._loss(module, batch))

        (value, metrics), after = self._functional.call(run, params, model_state or {}, rng, batch)
        return value, (metrics, after)


def _loss_and_metrics(out: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the loss and the metrics of a torch function; check their types."""
    value, metrics = out if isinstance(out, tuple) and len(out) == 2 else (out, {})
    is_tensor = isinstance(value, torch.Tensor)
    if not is_tensor or value.shape != () or not value.is_floating_point():
        raise ValueError(
            "as_loss: `loss(module, batch)` must return a floating scalar tensor, or (scalar "
            f"tensor, metrics dict), got {_kind(out)}."
        )
    if not isinstance(metrics, dict):
        raise ValueError(f"as_loss: metrics must be a dict of scalars, got {_kind(metrics)}.")
    for name, metric in metrics.items():
        is_number = isinstance(metric, bool | int | float)
        if not is_number and not (isinstance(metric, torch.Tensor) and metric.shape == ()):
            raise ValueError(f"as_loss: the metric {name!r} must be a scalar, got {_kind(metric)}.")
    return value, metrics


def _kind(x: Any) -> str:
    """Return a description of a value, for messages."""
    if isinstance(x, torch.Tensor):
        return f"a tensor of shape {tuple(x.shape)} and {x.dtype}"
    if isinstance(x, tuple):
        return f"({', '.join(map(_kind, x))})"
    return type(x).__name__
