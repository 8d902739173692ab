"""Meshes of every kind that a transform runs on, by name."""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import jaxslowmo as js


def explicit_mesh(axes):
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))


MESHES = {"auto": js.make_mesh, "explicit": explicit_mesh, "virtual": js.virtual_mesh}
