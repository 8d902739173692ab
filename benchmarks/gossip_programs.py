"""Size and compile time of the programs of gossip for TPU, by graph, nodes and mode.

    python benchmarks/gossip_programs.py --out benchmarks/results/gossip_programs.md

Compiles only (libtpu from PyPI, no TPU). "traced" is one program with a branch for each round;
"host" is one for each round, of which the first is compiled: the numbers are for one program.
Seconds are of processor time, which depends less on what else the machine does.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from machine import describe

import jaxslowmo as js
from jaxslowmo.models import GPTConfig, gpt_loss_fn, init_gpt

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.described import lowered_step
from support.tpu_slices import tpu_mesh

SLICES = {8: "v5e:2x4", 64: "v5e:8x8", 256: "v5e:16x16"}
GRAPHS: dict[str, Callable[[int], js.topology.Graph]] = {
    "ring": js.topology.ring,
    "npeer_directed_exponential, 1 peer": js.topology.npeer_directed_exponential,
    "npeer_directed_exponential, 2 peers": lambda n: js.topology.npeer_directed_exponential(
        n, peers_per_step=2
    ),
    "directed_linear": js.topology.directed_linear,
}
GPT = GPTConfig(num_layers=12, num_heads=8, embed_dim=256, context_length=128)


class Model(NamedTuple):
    name: str
    params: Any
    loss: Callable[..., jax.Array]
    example: jax.ShapeDtypeStruct
    graphs: list[str]


class Size(NamedTuple):
    """Of one program."""

    emitted_lines: int
    emitted_bytes: int
    lines: int
    bytes: int
    permutes: int
    pairs: int
    lower_seconds: float
    compile_seconds: float


def models() -> list[Model]:
    def mlp_loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        x = batch
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return jnp.mean(jnp.square(x))

    mlp = {f"w{i:02}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(12)}
    window = jax.ShapeDtypeStruct((GPT.context_length + 1,), jnp.int32)
    some = ["npeer_directed_exponential, 1 peer", "directed_linear"]  # it compiles for long
    found = [
        ("MLP", mlp, mlp_loss, jax.ShapeDtypeStruct((256,), jnp.float32), list(GRAPHS)),
        ("GPT", init_gpt(GPT), gpt_loss_fn(GPT), window, some),
    ]
    return [
        Model(f"{name}, {len(jax.tree.leaves(params))} leaves", params, *rest)
        for name, params, *rest in found
    ]


def of_first_round(sync: js.ParameterTransform, replicas: int) -> js.ParameterTransform:
    """Return a transform with the phase of its first update as its only one."""
    algorithm = sync.bound({"replica": replicas}).algorithm
    events = tuple(replace(event, forms=1) for event in algorithm.events)
    return js.ParameterTransform(replace(algorithm, events=events, bind=None))


def measure(
    model: Model, graph: js.topology.Graph, mesh: jax.sharding.Mesh, mode: Literal["traced", "host"]
) -> Size:
    """The traced program, or that of the first round."""
    sync = js.sgp("replica", graph=graph)
    batch = jax.ShapeDtypeStruct((4 * mesh.size, *model.example.shape), model.example.dtype)
    start = time.process_time()
    (lowered,) = lowered_step(
        model.loss,
        sync if mode == "traced" else of_first_round(sync, mesh.size),
        model.params,
        batch,
        mesh,
        mode=mode,
    ).values()
    middle = time.process_time()
    compiled = lowered.compile()
    end = time.process_time()
    emitted, text = lowered.as_text(), compiled.as_text() or ""
    permutes = re.findall(r" collective-permute(?:-start)?\(.*source_target_pairs=(\S*)", text)
    return Size(
        emitted.count("\n"),
        len(emitted),
        text.count("\n"),
        len(text),
        len(permutes),
        sum(len(re.findall(r"\{\d+,\d+\}", pairs)) for pairs in permutes),
        middle - start,
        end - middle,
    )


def rows(model: Model, nodes: int, name: str) -> list[str]:
    graph = GRAPHS[name](nodes)
    mesh = tpu_mesh(SLICES[nodes], {"replica": nodes})
    found = []
    for mode in ("traced", "host"):
        size = measure(model, graph, mesh, mode)
        cells = [
            *(model.name, name, nodes, mode, graph.num_rounds if mode == "host" else 1),
            f"{size.emitted_lines:,}",
            f"{size.emitted_bytes / 1000:,.0f}",
            f"{size.lines:,}",
            f"{size.bytes / 1000:,.0f}",
            f"{size.permutes}",
            f"{size.pairs:,}",
            f"{size.lower_seconds:.1f}",
            f"{size.compile_seconds:.1f}",
        ]
        found.append("| " + " | ".join(map(str, cells)) + " |")
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(SLICES))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    machine = describe()
    lines = [
        f"jax {machine['jax']}, libtpu {version('libtpu')}, Python {machine['python']}, "
        f"{machine['processor']}, {machine['cores']} cores; "
        "`python benchmarks/gossip_programs.py`",
        "",
        "| model | graph | nodes | mode | programs | StableHLO lines | kB | compiled lines | kB "
        "| permutes | pairs | trace + lower, CPU s | compile, CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    tpu_mesh(SLICES[8], {"replica": 8})  # loads the compiler, which is not to be timed
    for model in models():
        for name in model.graphs:
            for nodes in args.nodes:
                lines += rows(model, nodes, name)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
