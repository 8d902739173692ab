"""Detection of iterators that overwrite the arrays of a batch while it waits for its turn."""

import array
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._support.types import PyTree

_WHOLE_BYTES = 1 << 22  # arrays of at most so many bytes are compared whole: about 1 ms
_PIECES = 1024  # that are read of a larger array
_PIECE_BYTES = 1 << 12
# Attributes and types of objects whose memory `np.asarray` shares, so that a change is visible.
_INTERFACES = ("__array_interface__", "__dlpack__")
_BUFFERS = (array.array, bytearray, memoryview)


class Sample(NamedTuple):
    """Checksums of the arrays of a batch, to detect changes.

    Attributes:
      seed: the seed that decides which places of arrays larger than 4 MB are read.
      prints: a checksum for each array.
      kept: the objects in arrays of objects; while they live, no other object has their ids.
    """

    seed: int
    prints: tuple[Any, ...]
    kept: tuple[Any, ...]


def sample_of(batch: PyTree, seed: int | None = None) -> Sample:
    """Return checksums of the arrays of the host in a batch.

    An array of up to 4 MB is read whole. Of a larger one 1024 pieces of 4 kB are read, one at a
    random place in each of 1024 equal parts. A change is missed only if it touches no piece, which
    a change of a whole part cannot, or if two CRC-32 are equal (once in 4e9).

    Args:
      batch: any tree. NumPy arrays of any layout and dtype are read, and arrays of other libraries
        that share their memory with NumPy, such as torch tensors on the CPU (except bfloat16 and
        tensors that require gradients). Arrays of objects are compared by the identity of the
        objects; masks of masked arrays are not compared. Arrays of jax cannot change.
      seed: the seed of an earlier sample, for a comparison with it; None draws one.
    """
    seed = int(np.random.default_rng().integers(1 << 32)) if seed is None else seed
    random = np.random.default_rng(seed)
    prints, kept = [], []
    for leaf in jax.tree.leaves(batch):
        x = _memory_of(leaf)
        if x is not None:
            prints.append(tuple(_prints(x, random, kept)))
    return Sample(seed, tuple(prints), tuple(kept))


def refuse_changed(batch: PyTree, sample: Sample) -> None:
    """Raise `ValueError` if arrays of a batch have changed since the sample was taken.

    Args:
      batch: batch that waited for its turn.
      sample: checksums of the batch, taken right after it was loaded.
    """
    if sample.prints != sample_of(batch, sample.seed).prints:
        raise ValueError(
            "`batches` changes arrays of a batch after it has yielded it, such as by filling one "
            "array again and again, while batches are loaded ahead: yield copies, or pass "
            "`depth`=0 (`prefetch`=0 to js.train_loop)."
        )


def _memory_of(leaf: Any) -> np.ndarray | None:
    """Return a NumPy array that shares the memory of a leaf; None if there is none to share."""
    shares = isinstance(leaf, _BUFFERS) or any(hasattr(leaf, name) for name in _INTERFACES)
    if not shares or isinstance(leaf, jax.Array | np.generic):
        return None
    try:
        return np.asarray(leaf)
    except Exception:  # such as a torch tensor on a GPU; the code that uses the batch raises
        return None


def _prints(x: np.ndarray, random: np.random.Generator, kept: list[Any]) -> Iterator[Any]:
    """Yield checksums of an array, or the ids of the objects in it, which are added to `kept`."""
    if x.dtype.names is not None and x.dtype.hasobject:
        for name in x.dtype.names:
            yield from _prints(x[name], random, kept)
        return
    checksum = 0
    for piece in _pieces(x, random):
        if x.dtype.kind == "O":
            kept.extend(piece.tolist())
            yield tuple(map(id, piece.tolist()))
        elif x.dtype.hasobject:  # strings of any length
            yield tuple(piece.tolist())
        else:
            checksum = zlib.crc32(np.ascontiguousarray(piece).view(np.uint8).data, checksum)
    yield checksum


def _pieces(x: np.ndarray, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the elements of an array as one flat array, or some pieces of a large one."""
    if x.size == 0 or x.itemsize == 0:
        return
    is_large = x.nbytes > _WHOLE_BYTES
    if x.flags.f_contiguous:
        x = x.T  # C-contiguous, so that `reshape` copies nothing
    if not is_large:
        yield x.reshape(-1)
        return
    # `reshape` would copy a large array of another layout; slices of `flat` copy only a piece.
    flat: Any = x.reshape(-1) if x.flags.c_contiguous else x.flat
    bounds = np.linspace(0, x.size, min(_PIECES, x.size) + 1).astype(np.int64)
    length = max(1, _PIECE_BYTES // x.itemsize)
    last = np.maximum(bounds[1:] - length, bounds[:-1])
    begins = random.integers(bounds[:-1], last, endpoint=True)
    for begin, end in zip(begins.tolist(), bounds[1:].tolist(), strict=True):
        yield flat[begin : min(begin + length, end)]
