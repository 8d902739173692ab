"""Arrays of a checkpoint: read from where orbax puts them, and compared with what was saved.

Orbax's own restoring meets the other processes at barriers, so one process that cannot read its
part would leave them waiting; what is read here is read alone, and the processes agree afterwards.
Files may come to hold other bits, and zarr does not notice: fingerprints tell.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..mesh import FINGERPRINT_SEEDS, fingerprint
from ._folder import UnreadableError, epath, ts


def first_line(error: BaseException) -> str:
    """Of its message, at most 300 characters; its type where there is none."""
    return str(error).strip().split("\n")[0][:300] or type(error).__name__


def read_arrays(path: epath.Path, keys: Sequence[str], like: Sequence[Any] | None) -> list[Any]:
    """Arrays as they are stored.

    Args:
      path: of the item that holds them.
      keys: under which they are stored.
      like: structs with the shardings that they shall have: each process reads its part. None
        reads all of them as NumPy arrays.

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
        "kvstore": {"driver": "ocdbt", "base": f"{base}/", "path": f"{key}/"},
    }


def _placed(stores: Sequence[Any], like: Sequence[Any]) -> list[jax.Array]:
    # All reads at once, so that files are read side by side; a part for several devices once.
    parts = []
    for store, struct in zip(stores, like, strict=True):
        wanted = struct.sharding.addressable_devices_indices_map(struct.shape).values()
        once = {str(index): index for index in wanted}
        parts.append({text: store[index].read() for text, index in once.items()})
    return [
        jax.make_array_from_callback(
            struct.shape, struct.sharding, lambda index, own=own: own[str(index)].result()
        )
        for struct, own in zip(like, parts, strict=True)
    ]


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
