"""What travels between the devices that share tables: one collective each time for all tables."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..collectives import gather_slices
from ..mesh import axis_size, settle


def num_devices(axis_name: str | None) -> int:
    """Devices along the axis; 1 where there is none."""
    return 1 if axis_name is None else axis_size(axis_name)


def swap_blocks(blocks: Sequence[jax.Array], axis_name: str | None) -> list[jax.Array]:
    """Sends entry d of each block to device d: what arrives stands where its sender's number is.

    Args:
      blocks: (devices, *s) each.
      axis_name: axis of the devices; None: there is one.

    Returns:
      Arrays of the same shapes.

    Communication: one all-to-all of all blocks of one dtype over `axis_name`; none on one device.
    """
    size = num_devices(axis_name)
    if size == 1:
        return list(blocks)
    arrived: list[jax.Array] = list(blocks)
    for dtype in sorted({block.dtype for block in blocks}, key=str):
        chosen = [i for i, block in enumerate(blocks) if block.dtype == dtype]
        flat = jnp.concatenate([blocks[i].reshape(size, -1) for i in chosen], axis=1)
        flat = lax.all_to_all(flat, axis_name, split_axis=0, concat_axis=0, tiled=True)
        parts = lax.split(flat, [blocks[i].size // size for i in chosen], axis=1)
        for i, part in zip(chosen, parts, strict=True):
            arrived[i] = part.reshape(blocks[i].shape)
    return arrived


def gather_blocks(blocks: Sequence[jax.Array], axis_name: str | None) -> list[jax.Array]:
    """Every device's blocks on all of them, typed as equal there.

    Args:
      blocks: (k,) each, of one dtype.
      axis_name: axis of the devices; None: there is one.

    Returns:
      Arrays (devices, k).

    Communication: one all-gather of all blocks over `axis_name`; none on one device.
    """
    if not blocks or axis_name is None:
        return [block[None] for block in blocks]
    if axis_size(axis_name) == 1:
        return [settle(block, axis_name)[None] for block in blocks]
    flat = gather_slices(jnp.concatenate(blocks)[None], axis_name, like=jnp.zeros([]))
    return list(lax.split(flat, [block.size for block in blocks], axis=1))
