"""What the TPU compiler makes of psum_scatter + all_gather, by shape of the buffer and by slice.

    python benchmarks/tpu_shapes.py --out benchmarks/results/tpu_shapes.md

Compiles only (libtpu from PyPI, no TPU), so it tells structure, not speed. The rule drawn from it
stands in `jaxslowmo/collectives/_scatter.py`, and `tests/tpu_aot` holds it.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import argparse
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.collectives import shard_layout

SLICES = [
    ("v5e:2x4", {"replica": 8}),
    ("v5e:2x4", {"replica": 4, "device": 2}),
    ("v5e:4x4", {"replica": 16}),
    ("v5e:4x4", {"replica": 4, "device": 4}),
    ("v6e:4x4", {"replica": 8, "device": 2}),
    ("v5p:2x2x4", {"replica": 4, "device": 4}),
]
MILLIONS = [0.05, 1, 10, 124.4]


def shapes(size: int, replicas: int) -> dict[str, tuple[int, ...]]:
    """Buffers of at least `size` elements: two that were tried, and the library's."""
    layout = shard_layout(size, replicas)
    rows = -(-size // (8 * replicas * 128)) * 8
    return {
        "1-D": (replicas * rows * 128,),
        "(R * rows, 1024), tiled": (-(-size // (8 * replicas * 1024)) * 8 * replicas, 1024),
        "(R, rows, 128), the library's": (replicas, layout.rows, layout.lanes),
    }


def compiled_forms(mesh: Mesh, shape: tuple[int, ...]) -> str:
    """Collectives over "replica" in the compiled program."""
    untiled = len(shape) == 3
    replicas = mesh.shape["replica"]

    def exchange(x: jax.Array, anchor: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean = lax.psum_scatter(x[0], "replica", scatter_dimension=0, tiled=not untiled)
        anchor = anchor[0] - 0.5 * (anchor[0] - mean)
        return lax.all_gather(anchor, "replica", axis=0, tiled=True)[None], anchor[None]

    shard = shape[1:] if untiled else (shape[0] // replicas, *shape[1:])
    sharding = NamedSharding(mesh, P("replica"))
    args = [
        jax.ShapeDtypeStruct((replicas, *s), jnp.float32, sharding=sharding) for s in (shape, shard)
    ]
    step = jax.shard_map(exchange, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"))
    rows = js.comm_report(step, *args).select(axis="replica", level="compiled")
    return " + ".join(f"{r.count} {r.collective} ({r.bytes / 2**20:.1f} MiB)" for r in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    lines = [
        f"jax {jax.__version__}, libtpu {version('libtpu')}; `python benchmarks/tpu_shapes.py`",
        "",
        "| slice | axes | elements | buffer | compiled to |",
        "|---|---|---|---|---|",
    ]
    for topology, axes in SLICES:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        mesh = Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))
        sizes = " x ".join(f"{size} {name}" for name, size in axes.items())
        for millions in MILLIONS:
            for name, shape in shapes(int(millions * 1e6), axes["replica"]).items():
                found = compiled_forms(mesh, shape)
                lines.append(f"| {topology} | {sizes} | {millions} M | {name} | {found} |")
                print(lines[-1], flush=True)
    if out:
        out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
