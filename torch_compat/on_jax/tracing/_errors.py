"""Clear errors for operations that torchax and jax cannot do."""

from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

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
    "aten.embedding_renorm": _RENORMED,
    "aten._ctc_loss": "use another loss, or optax.ctc_loss on the logits of on_jax.as_apply",
    "aten.nonzero": _MASKED,
    "aten.masked_select": _MASKED,
    "aten.index": _MASKED,
    "aten._unique": "count over all possible values (F.one_hot), whose number is fixed",
    "aten.bincount": "sum F.one_hot(x, n), whose size is fixed",
    "aten.is_nonzero": _IF,
    "aten._local_scalar_dense": f"{_IF}, and in place of a number {_NUMBER}",
    "Tensor.tolist": _NUMBER,
    "Tensor.numpy": _NUMBER,
    "aten._standard_gamma": "draw with torch.rand or torch.randn, or take the draws in the batch",
    "aten.poisson": "draw with torch.rand or torch.randn, or take the draws in the batch",
}
_DEFAULT = "write it with other operations, or train with torch itself or torch_xla"


def refusal(name: str, layer: str, *, needs_value: bool = False) -> ValueError:
    """Return the error for an operation that has no form in jax, or needs values."""
    matches = [key for key in _INSTEAD if name.startswith(key)]
    instead = _INSTEAD[max(matches, key=len)] if matches else _DEFAULT
    if instead is _MASKED and not needs_value:
        instead = _DEFAULT
    if name == "aten._local_scalar_dense":
        name += " (`if`, `.item()`, `int()`)"
    why = ", which has no form in jax"
    if needs_value:
        why = ", which needs values that are not known while the program is compiled"
    return ValueError(f"{layer} uses {name}{why}: {instead}.")


def name_of(func: Any) -> str:
    """Return an operation's name as in its documentation, without overloads."""
    return f"{func.namespace}.{func.overloadpacket.__name__}"


def layer_of(names: dict[int, str], frames: Iterable[FrameType]) -> str:
    """Return the name of the innermost module whose method is running, from names by id."""
    for frame in frames:
        part = frame.f_locals.get("self")
        if isinstance(part, torch.nn.Module) and id(part) in names:
            kind = type(part).__name__
            if type(part).__module__.startswith("torch.nn."):
                kind = f"nn.{kind}"
            name = names[id(part)]
            return f"Layer `{name}` ({kind})" if name else f"The module ({kind})"
    return "The loss function"
