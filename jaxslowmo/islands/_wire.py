"""How a displacement travels: as float32, or in the few bits of a codec."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..collectives.codecs import Codec


class Wire:
    """The payload of a part.

    Args:
      codec: a codec of `js.codecs`; None sends float32.
      size: number of elements of the model.

    Attributes:
      shapes: name, shape and dtype of its array.
      num_bytes: bytes of its array.
    """

    def __init__(self, codec: Codec | None, size: int) -> None:
        self._codec: Any = codec
        self._size = size
        self.error_feedback = codec is not None and codec.error_feedback
        self.shapes: Mapping[str, tuple[tuple[int, ...], Any]]
        if codec is None:
            self.num_bytes, self.shapes = 4 * size, {"displacement": ((size,), np.float32)}
            return
        row = jax.ShapeDtypeStruct((1, size), np.float32)
        self._packed = jax.eval_shape(codec.encode, row).shape
        self._encode = jax.jit(codec.encode)
        self.num_bytes = int(np.prod(self._packed))
        self.shapes = {"codes": ((self.num_bytes,), np.uint8)}

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Return a vector of float32 as it is sent."""
        if self._codec is None:
            return x
        return jax.device_get(self._encode(jax.device_put(x[None]))).reshape(-1)

    def decode(self, sent: np.ndarray) -> np.ndarray:
        """Return the vector that was sent, the same bits on every machine."""
        if self._codec is None:
            return sent
        return self._codec.decode(sent.reshape(self._packed), self._size)[0]


def concatenate(leaves: Sequence[np.ndarray]) -> np.ndarray:
    """Return the leaves of a model as one vector."""
    return np.concatenate([np.ravel(x) for x in leaves]) if leaves else np.zeros(0, np.float32)


def split_like(x: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return a vector as leaves; the inverse of `concatenate`."""
    ends = np.cumsum([leaf.size for leaf in like])
    parts = np.split(x, ends[:-1]) if like else []
    return [part.reshape(leaf.shape) for part, leaf in zip(parts, like, strict=True)]
