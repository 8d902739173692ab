"""Where several processes exchange through gloo, some collectives need another form to be fast."""

import jax

from .._typing import AxisName
from ..mesh import axis_names


def between_cpu_processes(axis_name: AxisName) -> bool:
    """Whether collectives over the axis run between processes on CPU.

    False for what is compiled for other platforms, for the devices of one process, and under vmap,
    where nothing is sent: there the compiler's own collectives are what to use.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not all(name in manual for name in axis_names(axis_name)):
        return False
    return jax.default_backend() == "cpu" and jax.process_count() > 1
