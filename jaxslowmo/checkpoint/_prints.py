"""Fingerprints of what was saved: files may come to hold other bits, and zarr does not notice."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..mesh import FINGERPRINT_SEEDS, fingerprint
from ._folder import UnreadableError
from ._orbax import epath


@jax.jit
def _prints(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([fingerprint(x) for x in arrays])


def prints_of(arrays: Sequence[Any]) -> list[list[int]]:
    """Two numbers of 32 bits for each array, of all its replicas; the same wherever it lies.

    Communication: one all-reduce of 8 bytes per array over all devices that it is split over.
    """
    found = _prints(list(arrays))
    return np.asarray(found.addressable_data(0)).tolist() if arrays else []


def host_print(x: np.ndarray) -> list[int]:
    """The same of an array on the host, computed there."""
    words = _words(x).reshape(-1)
    totals = [0] * len(FINGERPRINT_SEEDS)
    for start in range(0, words.size, _CHUNK):
        part = words[start : start + _CHUNK].astype(np.uint32)
        place = np.arange(start, start + part.size, dtype=np.uint64).astype(np.uint32)
        for i, seed in enumerate(FINGERPRINT_SEEDS):
            hashes = _hash(part ^ _hash(place + np.uint32(seed)))
            # Integers of Python: sums of NumPy's scalars warn where they wrap around.
            totals[i] = (totals[i] + int(hashes.sum(dtype=np.uint32))) % 2**32
    return totals


_CHUNK = 1 << 20  # words, so that little memory is needed beside the array


def _hash(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _words(x: Any) -> np.ndarray:
    """As `bit_words` does it on a device."""
    if np.iscomplexobj(x):
        return np.stack([_words(x.real), _words(x.imag)], -1)
    if x.dtype == np.bool_:
        return x
    kind = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    if kind(x.dtype).bits < 8:
        x = x.astype(np.float32)
    x = np.ascontiguousarray(x)
    words = np.dtype({1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32))
    return x.reshape(-1).view(words).reshape(*x.shape, x.dtype.itemsize // words.itemsize)


def check_prints(
    path: epath.Path,
    names: Sequence[str],
    found: Sequence[Sequence[int]],
    saved: Sequence[Sequence[int]],
) -> None:
    """Compare what was read with what was saved.

    Raises:
      UnreadableError: they differ.
    """
    wrong = [name for name, a, b in zip(names, found, saved, strict=True) if list(a) != list(b)]
    if wrong:
        raise UnreadableError(
            f"{path} is damaged: it gives other values than were saved in {', '.join(wrong[:5])}."
        )
