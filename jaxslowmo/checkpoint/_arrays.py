"""Arrays of a checkpoint, read straight from where orbax puts them.

Orbax's own restoring meets the other processes at barriers, so one process that cannot read its
part would leave them waiting; what is read here is read alone, and the processes agree afterwards.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ._folder import UnreadableError
from ._orbax import epath, ts


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
