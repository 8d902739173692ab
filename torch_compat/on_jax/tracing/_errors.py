"""Clear errors for operations that torchax and jax cannot do."""

import contextlib
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as torch_tree
from torch.utils._mode_utils import no_dispatch

from ._known import VALUE_NEEDED
from ._torchax import OperatorNotFound, Tensor

_PACKAGE = str(Path(__file__).parents[2])
_PADDED = "give the layer the padded sequences, and mask what lies past their lengths"
_RENORMED = (
    "leave `max_norm` out, and normalise the rows in forward, such as "
    "`F.embedding(ids, torch.renorm(weight, 2, 0, max_norm))`"
)
_MASKED = "keep the shape: torch.where(mask, x, 0), or multiply by the mask"
_IF = "use torch.where, which computes both cases"
_NUMBER = "compute with the tensor itself, and return it where it is a metric"
# Alternatives, by the start of an operation's name.
_INSTEAD = {
    "aten._pack_padded_sequence": _PADDED,
    "aten._pad_packed_sequence": _PADDED,
    "aten.embedding_renorm_": _RENORMED,
    "aten._ctc_loss": "use another loss, or optax.ctc_loss on the logits of on_jax.as_apply",
    "aten.nonzero": _MASKED,
    "aten.masked_select": _MASKED,
    "aten.index": _MASKED,
    "Tensor.__getitem__": _MASKED,
    "Tensor.__setitem__": "write torch.where(mask, value, x)",
    "aten._unique": "count over all possible values (F.one_hot), whose number is fixed",
    "aten.unique": "count over all possible values (F.one_hot), whose number is fixed",
    "aten.bincount": "sum F.one_hot(x, n), whose size is fixed",
    "aten.is_nonzero": _IF,
    "aten._local_scalar_dense": f"{_IF}, and in place of a number {_NUMBER}",
    "Tensor.tolist": _NUMBER,
    "Tensor.numpy": _NUMBER,
    "aten._to_sparse": "compute with dense tensors",
    "aten._standard_gamma": "draw with torch.rand or torch.randn, or take the draws in the batch",
    "aten.poisson": "draw with torch.rand or torch.randn, or take the draws in the batch",
    "aten.linalg_householder_product": 'give the parametrization `orthogonal_map="matrix_exp"`',
}
_DEFAULT = "write it with other operations, or train with torch itself or torch_xla"


def is_of_this_package(error: BaseException) -> bool:
    """Return whether this package has raised the error, which then needs no translation."""
    if isinstance(error, OperatorNotFound):
        return False
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_code.co_filename.startswith(_PACKAGE)


def raise_translated(
    error: Exception, root: torch.nn.Module | None, func: Any, args: Any, kwargs: Any
) -> NoReturn:
    """Raise an error that the user of a module can act on for one of torchax or jax.

    If torch refuses these arguments as well, such as shapes that do not match, it is torch's error.
    Otherwise it is a `ValueError` that names the layer, the operation, and an alternative.

    Args:
      error: error of the operation.
      root: module that is traced.
      func: the operation.
      args: its positional arguments.
      kwargs: its keyword arguments.
    """
    if not isinstance(error, (*VALUE_NEEDED, OperatorNotFound)):
        refusal = _refusal_of_torch(func, args, kwargs)
        if refusal is not None:
            raise type(refusal)(*refusal.args) from error
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    raise ValueError(_sentence(error, root, frames, _name(func))) from error


@contextlib.contextmanager
def values_refused(root: torch.nn.Module | None) -> Iterator[None]:
    """Run the block; methods of tensors that need values raise the same errors as operations."""
    try:
        yield
    except VALUE_NEEDED as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
        methods = (f.f_code for f in frames if isinstance(f.f_locals.get("self"), Tensor))
        name = next((f"Tensor.{code.co_name}" for code in methods), "the value of a tensor")
        raise ValueError(_sentence(error, root, frames, name)) from error


def _sentence(
    error: Exception, root: torch.nn.Module | None, frames: Iterable[FrameType], name: str
) -> str:
    """Return the message; `frames` begin with the innermost."""
    matches = [key for key in _INSTEAD if name.startswith(key)]
    instead = _INSTEAD[max(matches, key=len)] if matches else _DEFAULT
    if instead is _MASKED and not isinstance(error, VALUE_NEEDED):
        instead = _DEFAULT
    if name == "aten._local_scalar_dense":
        name += " (`if`, `.item()`, `int()`)"
    return f"{_layer(root, frames)} uses {name}{_why(error)}: {instead}."


def _why(error: Exception) -> str:
    if isinstance(error, VALUE_NEEDED):
        return ", which needs values that are not known while the program is compiled"
    return ", which has no form in jax"


def _name(func: Any) -> str:
    """Return an operation's name as in its documentation, without overloads."""
    if isinstance(func, torch._ops.OpOverload):
        return f"{func.namespace}.{func._opname}"
    return getattr(func, "__qualname__", str(func)).replace("TensorBase.", "Tensor.")


def _layer(root: torch.nn.Module | None, frames: Iterable[FrameType]) -> str:
    """Return the name, in `root`, of the innermost module whose method is running."""
    names = {} if root is None else {id(part): name for name, part in root.named_modules()}
    for frame in frames:
        part = frame.f_locals.get("self")
        if isinstance(part, torch.nn.Module) and id(part) in names:
            kind = type(part).__name__
            if type(part).__module__.startswith("torch.nn."):
                kind = f"nn.{kind}"
            name = names[id(part)]
            return f"Layer `{name}` ({kind})" if name else f"The module ({kind})"
    return "The loss function"


def _refusal_of_torch(func: Any, args: Any, kwargs: Any) -> Exception | None:
    """Return the error that torch raises for tensors of these shapes, or None."""

    def without_values(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device="meta")

    with no_dispatch(), torch._C.DisableTorchFunction():
        args, kwargs = torch_tree.tree_map_only(torch.Tensor, without_values, (args, kwargs or {}))
        try:
            func(*args, **kwargs)
        except NotImplementedError:  # torch's check needs values
            return None
        except Exception as refusal:
            return refusal
    return None
