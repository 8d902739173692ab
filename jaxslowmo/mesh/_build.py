"""Meshes from axis names and sizes: of devices, or of virtual replicas on one device."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from .._support.checks import as_int
from ._slices import by_slice, num_slices, slice_major_devices


@dataclass(frozen=True)
class VirtualMesh:
    """Axes without devices: replicas run under `vmap(axis_name=...)` on the default device.

    Takes the place of a `jax.sharding.Mesh` in every function of this library that has a `mesh`
    argument. Nothing is sent; collectives become reductions over a batch dimension.

    Attributes:
      axes: `(name, size)` pairs, outermost first.
    """

    axes: tuple[tuple[str, int], ...]

    @property
    def shape(self) -> Mapping[str, int]:
        """Size of each axis by name."""
        return MappingProxyType(dict(self.axes))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes, outermost first."""
        return tuple(name for name, _ in self.axes)


def _checked_axes(axes: Mapping[str, int]) -> dict[str, int]:
    """Return `axes` with plain ints; raise `ValueError` for other sizes, or none."""
    if not axes:
        raise ValueError('`axes` must name at least one axis, such as {"replica": 4}.')
    sizes: dict[str, int] = {}
    for name, size in axes.items():
        number = as_int(size, 1)
        if number is None:
            raise ValueError(
                f"`axes`: the size of axis {name!r} must be an int >= 1, got {size!r}."
            )
        sizes[name] = number
    return sizes


def make_mesh(axes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of real devices with Auto axes.

    `jax.make_mesh` makes Explicit axes by default and then rejects inputs that are not placed;
    meshes of either kind work with the rest of this library.

    Over several TPU slices, which `jax.make_mesh` refuses, the outer axes run over the slices:
    with 4 slices `{"replica": 4, "device": 16}` makes each a replica, `{"replica": 8, "device": 8}`
    each two replicas, and `{"replica": 2, "device": 32}` gives each replica two slices.

    Args:
      axes: size by name, outermost (slowest network) first: `{"replica": 4, "device": 2}`.
      devices: devices to use; default all of `jax.devices()`, of which the first ones (slice by
        slice) are taken.

    Returns:
      A `jax.sharding.Mesh`; device order follows the hardware topology, as in `jax.make_mesh`, and
      slices stay together.

    Raises:
      ValueError: an empty mapping, a size below 1, fewer devices than the sizes' product, or sizes
        that would split a slice unevenly.

    Communication: none.
    """
    axes = _checked_axes(axes)
    found = list(jax.devices() if devices is None else devices)
    needed = math.prod(axes.values())
    if len(found) < needed:
        raise ValueError(
            f"`axes` {axes} need {needed} devices, found {len(found)} "
            f"({found[0].platform if found else 'none'}). On CPU, more can be made with "
            f'`jax.config.update("jax_num_cpu_devices", {needed})` before jax touches a device; '
            "`js.virtual_mesh` runs replicas on one device."
        )
    types = (AxisType.Auto,) * len(axes)
    chosen = by_slice(found)[:needed]
    if num_slices(chosen) > 1:
        return Mesh(slice_major_devices(axes, chosen), tuple(axes), axis_types=types)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=chosen)


def virtual_mesh(axes: Mapping[str, int]) -> VirtualMesh:
    """A mesh of virtual replicas, `vmap`ped on the default device.

    Args:
      axes: size by name, outermost first: `{"replica": 4}`.

    Returns:
      A `VirtualMesh`, usable wherever this library takes `mesh`.

    Raises:
      ValueError: an empty mapping or a size below 1.

    Communication: none, ever.
    """
    return VirtualMesh(tuple(_checked_axes(axes).items()))
