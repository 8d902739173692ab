"""Arguments and results of a model: nested tensors, calls with a batch, losses."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def map_tensors(tree: Any, function: Callable[[Any], Any], kind: type[Any] = torch.Tensor) -> Any:
    """Return `tree` with `function(tensor)` for every tensor, or other leaf of type `kind`.

    Mappings (which become dicts), tuples, named tuples, lists and dataclasses are searched for
    tensors; any other value stays as it is.
    """
    if isinstance(tree, kind):
        return function(tree)
    if hasattr(tree, "items"):  # dicts, and types such as BatchEncoding of transformers
        return {key: map_tensors(value, function, kind) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, function, kind) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(value, function, kind) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.init}
        return dataclasses.replace(tree, **map_tensors(fields, function, kind))
    return tree


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call with a dict as keywords, a list or tuple as positional arguments, or one argument."""
    if isinstance(batch, dict):
        return model(**batch)
    if isinstance(batch, list | tuple):
        return model(*batch)
    return model(batch)


def loss_of(outputs: Any) -> torch.Tensor:
    """Return the loss in the outputs of a model: `["loss"]`, `.loss`, the first of a tuple, or all.

    Raises:
      ValueError: none of these is a tensor with one element.
    """
    if isinstance(outputs, torch.Tensor):
        loss = outputs
    elif isinstance(outputs, dict):
        loss = outputs.get("loss")
    elif isinstance(getattr(outputs, "loss", None), torch.Tensor):
        loss = outputs.loss
    else:
        loss = outputs[0] if isinstance(outputs, list | tuple) and outputs else None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        description = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise ValueError(
            "The model must return its loss, a tensor with one element, by itself, as the first of "
            f'a tuple, as outputs["loss"] or outputs.loss; got {description} in a '
            f"{type(outputs).__name__}."
        )
    return loss.reshape(())
