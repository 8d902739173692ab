"""What jax has no public name for: no other file imports private modules of jax or jaxlib.

They may move in any release. `tests/_support/test_private_jax.py` then says what each one is for.
"""

from typing import Any

import jax
from jax._src import cloud_tpu_init, core, distributed, xla_bridge
from jaxlib import xla_client


def mapped_axis_sizes() -> dict[str, int]:
    """Return the size of each axis that is mapped at this point of the trace, by `vmap` too."""
    return dict(core.get_axis_env().axis_sizes)


def spmd_axes() -> frozenset[str]:
    """Return the axes of the `vmap(spmd_axis_name=...)` around this point of the trace."""
    return core.get_axis_env().spmd_axis_names


def is_axis_effect(effect: Any) -> bool:
    """Return whether an effect of an equation only says that it uses a mapped axis."""
    return isinstance(effect, core.NamedAxisEffect)


def coordinator_client() -> Any:
    """Return the client of `jax.distributed`; None before `jax.distributed.initialize`."""
    return distributed.global_state.client


def has_devices() -> bool:
    """Return whether jax has started its devices in this process."""
    return xla_bridge.backends_are_initialized()


def leave_out_missing_tpu() -> None:
    """Keep jax from starting an installed libtpu on a machine without a TPU."""
    if not cloud_tpu_init.running_in_cloud_tpu_vm:
        xla_bridge._backend_factories.pop("tpu", None)


def has_libtpu_without_tpu() -> bool:
    """Return whether libtpu is loaded, and jax's devices are of another platform."""
    return jax.default_backend() != "tpu" and xla_client.pjrt_plugin_loaded("tpu")
