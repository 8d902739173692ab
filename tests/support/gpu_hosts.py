"""Compilation for described GPUs on a CPU: XLA's CUDA plugin compiles, nothing runs.

A description has what XLA asks of a GPU, and no more; the figures are those of XLA's own
descriptions (its folder `xla/backends/gpu/target_config/specs`).
"""

import re
from collections.abc import Mapping

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

# Fields that these GPUs share.
_SPECIFICATION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  {own}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


def _specification(name: str, own: str) -> str:
    return _SPECIFICATION.format(name=name, own=own)


SPECIFICATIONS = {
    "H100": _specification(
        "NVIDIA H100 80GB HBM3",
        "shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 core_count: 132 "
        "fpus_per_core: 128 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 "
        "clock_rate_ghz: 1.98 device_memory_size: 84942979072 "
        "cuda_compute_capability { major: 9 }",
    ),
    "A100": _specification(
        "NVIDIA A100-SXM4-80GB",
        "shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912 core_count: 108 "
        "fpus_per_core: 64 memory_bandwidth: 2039040000000 l2_cache_size: 41943040 "
        "clock_rate_ghz: 1.41 device_memory_size: 85100068864 "
        "cuda_compute_capability { major: 8 }",
    ),
}


def memory_bandwidth(gpu: str) -> float:
    """Return the memory bandwidth of a described GPU, in bytes per second."""
    match = re.search(r"memory_bandwidth: (\d+)", SPECIFICATIONS[gpu])
    assert match is not None
    return float(match[1])


def gpu_mesh(
    axes: Mapping[str, int], *, num_hosts: int = 1, gpu: str = "H100", per_host: int = 8
) -> Mesh:
    """Return a mesh of `num_hosts` hosts with `per_host` described GPUs each, host by host."""
    description = topologies.get_topology_desc(
        topology_name="",
        platform="cuda",
        target_config=SPECIFICATIONS[gpu],
        topology=f"1x{num_hosts}x{per_host}",
    )
    return Mesh(np.array(description.devices).reshape(tuple(axes.values())), tuple(axes))
