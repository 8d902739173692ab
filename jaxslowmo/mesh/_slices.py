"""Devices of several TPU slices in mesh order: outer axes over the network between the slices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType


def num_slices(devices: Sequence[Any]) -> int:
    """How many slices the devices belong to; 1 where the platform knows none."""
    return len({_slice_of(device) for device in devices})


def by_slice(devices: Sequence[Any]) -> list[Any]:
    """The devices slice by slice, otherwise in their order."""
    return sorted(devices, key=_slice_of)


def slice_major_devices(axes: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray:
    """Devices of several slices as an array of the shape of `axes`.

    Args:
      axes: size by name, outermost first; as many devices as there are. The outermost axis runs
        over the slices. Where it is larger than their number, groups of its members share a slice;
        where it is smaller, the next axis runs over the slices that each of its members has.
      devices: the devices, equally many of each slice.

    Returns:
      An array of devices, in the order of their slices when flat; within a slice the order follows
      the hardware topology, as in `jax.make_mesh`.

    Raises:
      ValueError: slices that give different numbers of devices, or an axis that would split one
        unevenly.

    Communication: none.
    """
    found: dict[int, list[Any]] = {}
    for device in by_slice(devices):
        found.setdefault(_slice_of(device), []).append(device)
    counts = {index: len(members) for index, members in found.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} of slice {index}" for index, count in counts.items())
        raise ValueError(
            f"`axes` {dict(axes)} take {math.prod(axes.values())} devices, {listed}: a mesh over "
            "several slices needs equally many of each. Choose sizes whose product fills whole "
            "slices, or pass `devices`."
        )
    between = _sizes_between(axes, len(found))
    within = [size // outer for size, outer in zip(axes.values(), between, strict=True)]
    grids = [
        jax.make_mesh(
            tuple(within), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=members
        ).devices
        for members in found.values()
    ]
    # (outer sizes, inner sizes) -> each axis with its outer part first.
    stacked = np.stack(grids).reshape(*between, *within)
    order = [place for i in range(len(axes)) for place in (i, i + len(axes))]
    return stacked.transpose(order).reshape(tuple(axes.values()))


def _slice_of(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


def _sizes_between(axes: Mapping[str, int], slices: int) -> list[int]:
    """The part of each axis that runs over slices, outermost axes first.

    >>> _sizes_between({"replica": 8, "device": 4}, 4)
    [4, 1]
    >>> _sizes_between({"replica": 2, "device": 16}, 4)
    [2, 2]
    """
    parts, left = [], slices
    for name, size in axes.items():
        part = math.gcd(size, left)
        if part not in (size, left):
            raise ValueError(
                f"`axes` {dict(axes)}: outer axes run over the {slices} slices, so the size of "
                f"{name!r} must divide {left} or be a multiple of it, got {size}; it would split a "
                "slice unevenly."
            )
        parts.append(part)
        left //= part
    return parts
