"""Options for the compiler of a step's programs: which are refused, which are known to help."""

from collections.abc import Mapping
from typing import Any

from ..._support.types import CompilerOptions
from ...mesh import AnyMesh, device_mesh

# What the names of one platform's options begin with. Some of these names are known to the
# compilers of all platforms, which then do nothing with them.
_PLATFORMS = {
    "xla_cpu_": "cpu",
    "xla_gpu_": "gpu",
    "xla_tpu_": "tpu",
    "xla_jf_": "tpu",
    "xla_vf_": "tpu",
    "xla_gf_": "tpu",
    "xla_msa_": "tpu",
}

_GPU: dict[str, str | int | float | bool] = {"xla_gpu_enable_latency_hiding_scheduler": True}
# With one axis it would help nothing, and leaves fewer buckets of gradients beside products.
_GPU_LEVELS = {**_GPU, "xla_gpu_experimental_parallel_collective_overlap_limit": 2}
_V5E: dict[str, str | int | float | bool] = {"xla_max_concurrent_async_collective_permutes": 16}
_V5P = {**_V5E, "xla_tpu_enable_all_experimental_scheduler_features": True}
# By the names that devices give themselves, which changed between versions of libtpu.
_TPU = {
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V5P,
    "TPU v6e": _V5P,
}


def recommended_compiler_options(mesh: AnyMesh) -> dict[str, str | int | float | bool]:
    """Return the compiler options that let exchanges overlap on the devices of a mesh.

    Nothing sets them unasked: pass them, alone or with others, to a step, or to `jax.jit` in your
    own loop.

        options = js.recommended_compiler_options(mesh)
        step = js.make_train_step(loss_fn, optimizer, mesh=mesh, compiler_options=options)

    Each option is here because compiled programs show its effect; no time was measured.

    - GPU, on a mesh with several axes that are larger than 1,
      `xla_gpu_experimental_parallel_collective_overlap_limit=2`: two collectives may run at the
      same time. By default one does, so with two levels the exchange of `js.sgp(overlap=1)` waits
      for the all-reduce of the gradients inside a replica, and few products or none hide it. A
      step without `js.sgp` does not need it: there buckets and gathers run beside each other, and
      fewer of them beside products.
    - GPU, `xla_gpu_enable_latency_hiding_scheduler=True`: the default on H100, where it changes
      nothing. On A100 neither gossip nor the buckets of `js.all_reduce_gradients` run beside the
      products of the backward pass without it.
    - TPU v5e, v5p and v6e, `xla_max_concurrent_async_collective_permutes=16`: by default five
      permutes are in flight, so gossip with more peers waits for the others. Programs with fewer
      stay the same.
    - TPU v5p and v6e, `xla_tpu_enable_all_experimental_scheduler_features=True`: without it
      `js.sgp(overlap=1)` ends before or among the products of a step, and not after them.

    Args:
      mesh: the mesh of the step, whose first device decides. The devices may be described ones,
        of `jax.experimental.topologies`.

    Returns:
      Values by name; {} for CPUs, and for TPUs of other kinds.

    Communication: none.
    """
    device = _device_of(mesh)
    has_levels = sum(size > 1 for size in mesh.shape.values()) > 1
    by_platform = {
        "gpu": _GPU_LEVELS if has_levels else _GPU,
        "tpu": _TPU.get(device.device_kind, {}),
    }
    return dict(by_platform.get(device.platform, {}))


def checked_compiler_options(options: Any, mesh: AnyMesh) -> CompilerOptions:
    """Return the argument `compiler_options` of a step, which is not None.

    Raises:
      ValueError: an argument that is no mapping; a name that is empty, no str or has dashes in
        front; a value of another type; an option of another platform than that of the mesh.
    """
    if not isinstance(options, Mapping):
        raise ValueError(
            "`compiler_options` must be a mapping of names to values, such as "
            f"js.recommended_compiler_options(mesh), or None, got {options!r}."
        )
    for name, value in options.items():
        if not isinstance(name, str) or not name or name.startswith("-"):
            raise ValueError(
                "`compiler_options`: a name must be that of an option, without dashes in front, "
                f'such as "xla_gpu_enable_latency_hiding_scheduler", got {name!r}.'
            )
        if not isinstance(value, str | int | float | bool):
            raise ValueError(
                f"`compiler_options`: the value of {name!r} must be a str, int, float or bool, "
                f"got {value!r}."
            )
        prefix = next(filter(name.startswith, _PLATFORMS), None)
        if prefix is None or (platform := _device_of(mesh).platform) == _PLATFORMS[prefix]:
            continue
        raise ValueError(
            f"`compiler_options`: {name!r} is an option for {_PLATFORMS[prefix].upper()}s, and "
            f"`mesh` has {platform.upper()}s, whose compiler may ignore it without a word. "
            "Leave it out; js.recommended_compiler_options(mesh) has options by platform."
        )
    return tuple(options.items())


def _device_of(mesh: AnyMesh) -> Any:
    """Return a device on which the programs of a mesh run."""
    return device_mesh(mesh).devices.flat[0]
