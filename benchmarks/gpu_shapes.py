"""How long steps would take on H100s by the estimates of XLA's own compiler; nothing is timed.

    python benchmarks/gpu_shapes.py --out benchmarks/results/gpu_shapes.md

Compiles only (jax 0.10.2 with its CUDA plugin, no GPU): `make test-aot` makes the environment. What
the estimates are, and what they leave out, is in the page that it writes and in
`benchmarks/gpu_estimates.py`. All rows take 30 minutes on two cores, `--models mlp` takes two.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import jaxslowmo as js
from jaxslowmo.models import gpt_loss_fn, gpt_preset, gpt_types

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from gpu_estimates import Estimate, read_estimate, text_with_estimates

from support.described import lowered_step
from support.gpu_hosts import gpu_mesh, memory_bandwidth

GPU = "H100"
# GB/s between hosts for each GPU.
NETWORKS = {
    25.0: "XLA's own figure for an H100: 1.6 Tbit/s for a host of 8.",
    1.5625: "100 Gbit/s for a host of 8.",
}
TWO_IN_FLIGHT = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
COLUMNS = ("model", "GPUs", "algorithm", "step", "estimated ms", "kernels", "collectives")
HEADER = (*COLUMNS, "exposed", "not estimated by XLA")
TEXT = """# Estimated times of steps on H100s

jax {jax}, jax-cuda13-plugin {plugin}; `python benchmarks/gpu_shapes.py`. **Every time is an
estimate of XLA's compiler. Nothing ran on a GPU.**

The option `xla_gpu_collect_cost_model_stats` makes XLA write its "speed of light" estimate of each
instruction into the scheduled program. For an H100 it looks up matrix products and collectives
inside one host in tables of measured times. Between hosts it uses a formula of network bandwidth,
round trip and launch. For other fusions it divides bytes by the memory bandwidth, or operations by
the rate of the cores. The columns add these times up in the order of the schedule: a collective
starts when the kernels before it have ended, and the kernels after its end wait for it.

- *kernels*: all kernels, one after the other. *collectives*: all collectives.
- *exposed*: time for which kernels wait for a collective. The estimated time of a step is kernels
  and exposed.
- *not estimated by XLA*: the part of *kernels* for which XLA has no estimate (Triton's softmax,
  copies). It is the bytes that are read and written, divided by the memory bandwidth.

Left out: launches of kernels, that kernels and collectives slow each other down, several
collectives that share a link, and what autotuning on a real GPU changes.

Models: `mlp` has 4 layers of 2048 x 2048 in float32 (16 MiB each) and 2048 examples per GPU, with
SGD. `124m` is the preset with 17 blocks, AdamW and `js.gradients.Policy("bfloat16")`, and 8 windows
of 1024 bytes per GPU. On 8 GPUs each is a replica. On 4 x 8 each host is a replica: gradients are
averaged inside the host in every step; only `all_reduce` has one all-reduce over all 32. Steps are
host-scheduled; a step of gossip is the first round.
"""
# What follows in the page is kept.
END = "<!-- end of what benchmarks/gpu_shapes.py writes -->"
NETWORK = """
## 4 x 8 GPUs, {gigabytes:g} GB/s between hosts for each GPU

{meaning}
"""


class Model(NamedTuple):
    """A model to train: loss, shapes of its parameters and of the batch of one GPU, the rest."""

    loss: Callable[..., Any]
    params: Any
    batch: jax.ShapeDtypeStruct
    options: dict[str, Any]


def mlp() -> Model:
    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        x = batch
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return jnp.mean(jnp.square(x))

    weights = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    return Model(loss, {f"w{i}": weights for i in range(4)}, weights, {})


def gpt() -> Model:
    config = gpt_preset("124m")
    windows = jax.ShapeDtypeStruct((8, config.context_length + 1), jnp.uint8)
    options = {"optimizer": optax.adamw(6e-4), "policy": js.gradients.Policy("bfloat16")}
    return Model(gpt_loss_fn(config), gpt_types(config), windows, options)


MODELS: dict[str, Callable[[], Model]] = {"mlp": mlp, "124m": gpt}


class Case(NamedTuple):
    """A step to compile: its transforms, its kind, and options of the compiler."""

    name: str
    transforms: dict[str, Any]
    kind: str
    compiler_options: dict[str, Any] | None = None


def cases(mesh: Mesh) -> Iterator[Case]:
    several = "device" in mesh.shape
    inside: dict[str, Any] = {"local_axis_name": "device"} if several else {}
    average = js.local_sgd("replica", **inside)
    gradients = js.all_reduce_gradients(mesh.axis_names)
    yield Case("all_reduce", {"sync": None, "gradients": gradients}, "every")
    yield Case("local_sgd", {"sync": average}, "local")
    yield Case("local_sgd", {"sync": average}, "average")
    yield Case("slowmo", {"sync": js.slowmo("replica", base=average, **inside)}, "slow")
    yield Case("diloco", {"sync": js.diloco("replica", **inside)}, "slow")
    yield Case("sgp, overlap=0", {"sync": js.sgp("replica", **inside)}, "round 0")
    ahead = {"sync": js.sgp("replica", overlap=1, **inside)}
    yield Case("sgp, overlap=1", ahead, "round 0")
    if several:
        yield Case("sgp, overlap=1, two in flight", ahead, "round 0", TWO_IN_FLIGHT)


def estimate_of(model: Model, case: Case, mesh: Mesh) -> Estimate:
    size, *others = model.batch.shape
    batch = jax.ShapeDtypeStruct((size * mesh.size, *others), model.batch.dtype)
    transforms = {"sync": None, **case.transforms}
    programs = lowered_step(
        model.loss, params=model.params, batch=batch, mesh=mesh, **transforms, **model.options
    )
    text = text_with_estimates(programs[case.kind], case.compiler_options)
    return read_estimate(text, memory_bandwidth(GPU))


def rows(mesh: Mesh, where: str, models: list[str]) -> Iterator[str]:
    """Yield a line of the table for each model and step."""
    for name in models:
        model = MODELS[name]()
        for case in cases(mesh):
            times = estimate_of(model, case, mesh)
            shown = (times.step, times.kernels, times.collectives, times.exposed, times.by_bytes)
            cells = [name, where, case.name, case.kind, *(f"{time / 1000:.2f}" for time in shown)]
            yield line(cells)


def line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def head() -> list[str]:
    return [line(HEADER), line(["---"] * 4 + ["---:"] * 5)]


def rows_of_hosts(gigabytes: float, models: list[str]) -> Iterator[str]:
    """Yield the lines of 4 hosts from a process of its own: XLA reads the network's rate once."""
    option = f"--xla_gpu_analytical_latency_estimator_options=nic_speed_gbps={gigabytes}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {option}".strip()
    command = [sys.executable, __file__, "--only-hosts", "--models", *models]
    environment = {**os.environ, "XLA_FLAGS": flags}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield from (row.rstrip() for row in process.stdout)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only-hosts", action="store_true", help="print the rows of 4 hosts alone")
    arguments = parser.parse_args()
    if arguments.only_hosts:
        mesh = gpu_mesh({"replica": 4, "device": 8}, num_hosts=4, gpu=GPU)
        for row in rows(mesh, "4 x 8", arguments.models):
            print(row, flush=True)
        return
    lines: list[str] = []

    def add(*more: str) -> None:
        lines.extend(more)
        print("\n".join(more), flush=True)

    add(TEXT.format(jax=jax.__version__, plugin=version("jax-cuda13-plugin")))
    add("## 8 GPUs of one host", "", *head())
    for row in rows(gpu_mesh({"replica": 8}, gpu=GPU), "8", arguments.models):
        add(row)
    for gigabytes, meaning in NETWORKS.items():
        add(NETWORK.format(gigabytes=gigabytes, meaning=meaning), *head())
        for row in rows_of_hosts(gigabytes, arguments.models):
            add(row)
    if arguments.out:
        written = arguments.out.read_text("utf-8") if arguments.out.exists() else ""
        _, _, comment = written.partition(END)
        arguments.out.write_text("\n".join([*lines, "", END]) + (comment or "\n"), "utf-8")


if __name__ == "__main__":
    main()
