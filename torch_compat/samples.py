"""Serialisation of samples: pickled, with tensors as plain memory.

torch's own reducers put every tensor into a shared-memory file that a helper thread passes on. For
a stream of samples that costs file descriptors, and leaves files when a process dies.
"""

import io
import pickle
from typing import Any

import torch


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
