"""What gossip runs beside on TPU, by graph and slice, read off the compiled programs.

    python benchmarks/gossip_overlap.py --out benchmarks/results/gossip_overlap.md

Compiles only (libtpu from PyPI, no TPU), so it tells structure, not speed. Two tables: which
permutes are asynchronous at all, and how many of a step's matrix products run beside the exchange.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import argparse
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.described import lowered_step, shapes_on
from support.tpu_schedule import read_schedule
from support.tpu_slices import tpu_mesh

SLICES = {
    "v5e:2x4": 8,
    "v5e:4x4": 16,
    "v5e:4x8": 32,
    "v5e:8x8": 64,
    "v5e:16x16": 256,
    "v6e:4x4": 16,
    "v6e:8x8": 64,
    "v6e:16x16": 256,
    "v5p:4x4x4": 64,
}
GRAPHS: dict[str, Callable[[int], js.topology.Graph]] = {
    "npeer_directed_exponential": js.topology.npeer_directed_exponential,
    "ring": js.topology.ring,
    "directed_exponential": js.topology.directed_exponential,
    "hypercube": js.topology.hypercube,
}
OPTIONS = {
    "none": {},
    "scheduler": {"xla_tpu_enable_all_experimental_scheduler_features": "true"},
    "permutes": {"xla_max_concurrent_async_collective_permutes": "16"},
}
# Slice, graph, overlap, compiler options
STEPS = [
    ("v5e:2x4", js.topology.npeer_directed_exponential, 0, "none"),
    ("v5e:2x4", js.topology.npeer_directed_exponential, 1, "none"),
    ("v5e:2x4", js.topology.npeer_directed_exponential, 2, "none"),
    ("v5e:2x4", js.topology.complete, 1, "none"),
    ("v5e:2x4", js.topology.complete, 1, "permutes"),
    ("v5e:2x4", js.topology.star, 1, "none"),
    ("v5e:8x8", js.topology.npeer_directed_exponential, 1, "none"),
    ("v5e:8x8", js.topology.hypercube, 1, "none"),
    ("v5e:16x16", js.topology.hypercube, 1, "none"),
    *[
        (topology, js.topology.npeer_directed_exponential, overlap, options)
        for topology in ("v6e:8x8", "v5p:4x4x4")
        for overlap, options in ((0, "scheduler"), (1, "none"), (2, "none"), (1, "scheduler"))
    ],
]


def is_asynchronous(mesh: Mesh, permutation: tuple[tuple[int, int], ...]) -> bool:
    """Whether a permute has a start and an end of its own."""

    def exchange(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, "replica", permutation)

    fn = jax.shard_map(exchange, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"))
    x = shapes_on(jax.ShapeDtypeStruct((mesh.size * 1024,), jnp.float32), mesh, P("replica"))
    text = jax.jit(fn).lower(x).compile().as_text() or ""
    assert " collective-permute" in text
    return " collective-permute-start(" in text


def permute_rows() -> Iterator[str]:
    for topology, nodes in SLICES.items():
        mesh = tpu_mesh(topology, {"replica": nodes})
        cells = [topology, str(nodes)]
        for make in GRAPHS.values():
            graph = make(nodes)
            permutes = [p for step in range(graph.num_rounds) for p in graph.permutations(step)]
            found = sum(is_asynchronous(mesh, p) for p in permutes)
            cells.append(f"{found} of {len(permutes)}")
        yield "| " + " | ".join(cells) + " |"


def mlp_loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    x = batch
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return jnp.mean(jnp.square(x))


def step_rows() -> Iterator[str]:
    params = {f"w{i}": jax.ShapeDtypeStruct((2048, 2048), jnp.float32) for i in range(4)}
    for topology, make, overlap, options in STEPS:
        mesh = tpu_mesh(topology, {"replica": SLICES[topology]})
        batch = jax.ShapeDtypeStruct((1024 * mesh.size, 2048), jnp.float32)
        sync = js.sgp("replica", graph=make, overlap=overlap)
        lowered = lowered_step(mlp_loss, sync, params, batch, mesh)["round 0"]
        text = lowered.compile(compiler_options=OPTIONS[options] or None).as_text() or ""
        schedule = read_schedule(text)
        permutes = f"{len(schedule.starts)} asynchronous"
        if schedule.blocking:
            permutes = f"{schedule.blocking} blocking"
        beside = f"{schedule.num_beside} of {len(schedule.products)}"
        cells = [topology, make.__name__, overlap, options, permutes, beside]
        yield "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    lines: list[str] = []

    def add(*more: str) -> None:
        lines.extend(more)
        print("\n".join(more), flush=True)

    add(
        f"jax {jax.__version__}, libtpu {version('libtpu')}; `python benchmarks/gossip_overlap.py`",
        "",
        "Permutes of a rotation that are asynchronous:",
        "",
        "| slice | nodes | " + " | ".join(GRAPHS) + " |",
        "|---" * (2 + len(GRAPHS)) + "|",
    )
    for row in permute_rows():
        add(row)
    add(
        "",
        "Instructions with matrix products that run beside the whole exchange, in a step of an MLP "
        "with 4 layers of 2048 x 2048 and 1024 examples per chip, first round. Options: "
        + "; ".join(f"{k}: {v}" for k, v in ((k, _words(o)) for k, o in OPTIONS.items()) if v)
        + ".",
        "",
        "| slice | graph | overlap | options | permutes | products beside |",
        "|---|---|---|---|---|---|",
    )
    for row in step_rows():
        add(row)
    if out:
        out.write_text("\n".join(lines) + "\n")


def _words(options: dict[str, str]) -> str:
    return " ".join(f"`--{name}={value}`" for name, value in options.items())


if __name__ == "__main__":
    main()
