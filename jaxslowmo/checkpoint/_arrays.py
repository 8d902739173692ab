"""Functions that read arrays of a checkpoint from orbax's files and compare their fingerprints.

Restoring with orbax waits for the other processes at barriers, so a process that cannot read its
part would leave them waiting. Here each process reads without the others, and they agree on the
outcome afterwards. Zarr does not notice if files were damaged. Fingerprints do.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..mesh import FINGERPRINT_SEEDS, fingerprint
from ._folder import UnreadableError, epath, ts


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 300 characters; else its type."""
    return str(error).strip().split("\n")[0][:300] or type(error).__name__


def read_arrays(path: epath.Path, keys: Sequence[str], like: Sequence[Any] | None) -> list[Any]:
    """Read stored arrays.

    Args:
      path: path of the checkpoint's item that holds the arrays.
      keys: names under which orbax stored them.
      like: a `ShapeDtypeStruct` for each array, with the sharding of the result: each process reads
        its part. None reads whole arrays as NumPy arrays.

    Raises:
      UnreadableError: a missing or damaged file, or an array of another shape or dtype.

    Communication: none.
    """
    try:
        opened = [ts.open(_spec(path, key), open=True, read=True) for key in keys]
        stores = [future.result() for future in opened]
        if like is None:
            parts = [store.read() for store in stores]
            return [np.asarray(part.result()) for part in parts]
        for key, store, struct in zip(keys, stores, like, strict=True):
            if store.shape != struct.shape or store.dtype.numpy_dtype != struct.dtype:
                raise ValueError(f"{key} is {store.dtype.name}{list(store.shape)}")
        return _placed(stores, like)
    except Exception as error:  # tensorstore raises many kinds
        raise UnreadableError(f"{path.parent} is damaged: {first_line(error)}.") from error


def _spec(path: epath.Path, key: str) -> dict[str, Any]:
    base = str(path) if "://" in str(path) else path.resolve().as_uri()
    return {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": f"{base}/", "path": key},
    }


def _placed(stores: Sequence[Any], like: Sequence[Any]) -> list[jax.Array]:
    # Start all reads first, so that they run in parallel. Several devices share the read of a part.
    reads_by_array = []
    for store, struct in zip(stores, like, strict=True):
        indices = struct.sharding.addressable_devices_indices_map(struct.shape).values()
        unique = {str(index): index for index in indices}
        reads_by_array.append({text: store[index].read() for text, index in unique.items()})
    return [
        jax.make_array_from_callback(
            struct.shape, struct.sharding, lambda index, reads=reads: reads[str(index)].result()
        )
        for struct, reads in zip(like, reads_by_array, strict=True)
    ]


@jax.jit
def _prints(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([fingerprint(x) for x in arrays])


def prints_of(arrays: Sequence[Any]) -> list[list[int]]:
    """Return a fingerprint, two numbers of 32 bits, for each array; it does not depend on layouts.

    Communication: one all-reduce of 8 bytes per array over all devices that it is split over.
    """
    prints = _prints(list(arrays))
    return np.asarray(prints.addressable_data(0)).tolist() if arrays else []


def host_print(x: np.ndarray) -> list[int]:
    """Return the fingerprint of an array on the host, equal to that of `prints_of`."""
    words = _words(x).reshape(-1)
    totals = [0] * len(FINGERPRINT_SEEDS)
    for start in range(0, words.size, _CHUNK):
        part = words[start : start + _CHUNK].astype(np.uint32)
        place = np.arange(start, start + part.size, dtype=np.uint64).astype(np.uint32)
        for i, seed in enumerate(FINGERPRINT_SEEDS):
            hashes = _hash(part ^ _hash(place + np.uint32(seed)))
            # Python's integers, because sums of NumPy's scalars warn when they overflow.
            totals[i] = (totals[i] + int(hashes.sum(dtype=np.uint32))) % 2**32
    return totals


_CHUNK = 1 << 20  # words that are hashed at once, which bounds the additional memory


def _hash(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _words(x: Any) -> np.ndarray:
    """Return the bits of `x` as integers, like `jaxslowmo.mesh._in_sync.bit_words` on a device."""
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
    actual: Sequence[Sequence[int]],
    saved: Sequence[Sequence[int]],
) -> None:
    """Compare the fingerprints of arrays that were read with the saved fingerprints.

    Raises:
      UnreadableError: some of them differ.
    """
    wrong = [name for name, a, b in zip(names, actual, saved, strict=True) if list(a) != list(b)]
    if wrong:
        raise UnreadableError(
            f"{path} is damaged: it gives other values than were saved in {', '.join(wrong[:5])}."
        )
