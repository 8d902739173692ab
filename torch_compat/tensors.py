"""Tensors in memory, in nested values, and as bytes; calls of models with them."""

import dataclasses
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements may share memory: a stride within the extent of smaller ones."""
    end = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= end:
                return True
            end += stride * (size - 1)
    return False


def separate(tensors: Iterable[torch.Tensor]) -> None:
    """Give each element memory of its own, in place: torch writes to no others."""
    for tensor in tensors:
        if overlaps(tensor):
            tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)


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
            'The model must return its loss, a tensor with one element, alone, first or as "loss", '
            f"got {description} in a {type(outputs).__name__}."
        )
    return loss.reshape(())


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or not _is_plain(obj):
            return NotImplemented
        flat = obj.detach().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes()
        return _tensor, (data, obj.dtype, tuple(obj.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def dumps(sample: Any) -> bytes:
    """Return `sample` as bytes; tensors are restored equal, on the CPU, without gradients."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(sample)
    return buffer.getvalue()


loads = pickle.loads
