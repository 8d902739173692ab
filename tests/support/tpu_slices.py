"""Compilation for TPU slices on a CPU: libtpu compiles, nothing runs."""

from collections.abc import Mapping

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

import jaxslowmo as js


def tpu_mesh(topology: str, axes: Mapping[str, int], *, num_slices: int = 1) -> Mesh:
    """Return a mesh of the chips of one TPU slice ("v5e:2x4") or several, slice by slice."""
    options = {} if num_slices == 1 else {"num_slices": num_slices}
    description = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    devices = sorted(description.devices, key=lambda d: getattr(d, "slice_index", 0) or 0)
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def slices_mesh(topology: str, axes: Mapping[str, int], *, num_slices: int = 1) -> Mesh:
    """Return such a mesh from `js.make_mesh`, which orders the chips as users get them."""
    options = {} if num_slices == 1 else {"num_slices": num_slices}
    description = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    return js.make_mesh(axes, devices=description.devices)
