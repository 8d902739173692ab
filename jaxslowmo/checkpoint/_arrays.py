"""Functions that read the arrays of a checkpoint and compare their fingerprints.

Orbax's checkpointers wait for the other processes at barriers, so a process that cannot read its
part would leave them waiting. Its handlers do not: each process reads without the others, and they
agree on the outcome afterwards. Zarr does not notice if files were damaged. Fingerprints do.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..mesh import array_from_host, fingerprint
from ._folder import UnreadableError, epath, ocp

_types = ocp.type_handlers


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 300 characters; else its type."""
    return str(error).strip().split("\n")[0][:300] or type(error).__name__


def make_handler(*kinds: tuple[type, Any]) -> ocp.PyTreeCheckpointHandler:
    """Return orbax's handler of trees, without its store of array metadata.

    With that store, a process would wait ten minutes for process 0's folder.

    Args:
      *kinds: pairs of a class of arrays and orbax's handler of such arrays.
    """
    return ocp.PyTreeCheckpointHandler(
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            active_processes=set(range(jax.process_count())), barrier_sync_key_prefix="jaxslowmo"
        ),
        type_handler_registry=_types.create_type_handler_registry(*kinds),
    )


class _WholeReads(_types.TypeHandler):
    """A handler of orbax's whose reads have all ended when it returns, also if some have failed.

    Orbax ends its event loop when the first read fails. The others would go on without one, and
    each would print an exception that nobody can handle, at whatever time it is collected.
    """

    failure: Exception | None = None

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        before = asyncio.all_tasks()
        try:
            return await super().deserialize(infos, args)
        except Exception as error:  # tensorstore raises many kinds
            self.failure = error
            while reads := asyncio.all_tasks() - before:
                await asyncio.wait(reads)
            return [None for _ in infos]


class _Arrays(_WholeReads, _types.ArrayHandler):
    pass


class _NumpyArrays(_WholeReads, _types.NumpyHandler):
    pass


def read_arrays(path: epath.Path, structs: dict[str, jax.ShapeDtypeStruct]) -> list[Any]:
    """Read stored arrays.

    Args:
      path: path of the checkpoint's item that holds the arrays.
      structs: shape and dtype of each array by the name under which orbax stored it, with the
        sharding of the result: each process reads its part. Without one it is a whole NumPy array.

    Raises:
      UnreadableError: a missing or damaged file.

    Communication: none.
    """

    def how(x: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
        if x.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape)

    # Orbax stores no arrays of size 0.
    full = {key: x for key, x in structs.items() if x.size}
    args = ocp.args.PyTreeRestore(full, restore_args={key: how(x) for key, x in full.items()})
    reads = _Arrays(), _NumpyArrays()
    try:
        found = make_handler((jax.Array, reads[0]), (np.ndarray, reads[1])).restore(path, args=args)
        if failed := [one.failure for one in reads if one.failure]:
            raise failed[0]
    except Exception as error:  # tensorstore raises many kinds
        raise UnreadableError(f"{path.parent} is damaged: {first_line(error)}.") from error
    none = {key: x for key, x in structs.items() if not x.size}
    empty = {key: place_array(np.zeros(x.shape, x.dtype), x.sharding) for key, x in none.items()}
    arrays = found | empty
    return [arrays[key] for key in structs]


def place_array(x: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """Return an array of the host with this sharding; itself for None."""
    return x if sharding is None else array_from_host(x.shape, sharding, lambda index: x[index])


@jax.jit
def _jitted_fingerprints(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([fingerprint(x) for x in arrays])


def fingerprints(arrays: Sequence[Any]) -> list[list[int]]:
    """Return a fingerprint, two numbers of 32 bits, for each array; it does not depend on layouts.

    Communication: one all-reduce of 8 bytes per array over all devices that it is split over.
    """
    return jax.device_get(_jitted_fingerprints(list(arrays)).addressable_data(0)).tolist()


_CHUNK = 1 << 20  # elements that are hashed at once, which bounds the additional memory


def host_fingerprint(x: np.ndarray) -> list[int]:
    """Return the fingerprint of an array on the host, equal to that of `fingerprints`."""
    flat, total = x.reshape(-1), np.zeros(2, np.uint32)
    for start in range(0, flat.size, _CHUNK):
        total += fingerprint(flat[start : start + _CHUNK], np, start)
    return total.tolist()
