"""Beside which work H100s exchange the buckets of gradients, by order, size, hook and options.

    python benchmarks/gpu_buckets.py --out benchmarks/results/gpu_buckets.md

Compiles only (jax 0.10.2 with its CUDA plugin, no GPU): `make test-aot` makes the environment. All
rows take 15 minutes; `--layers 2` tries the script in two.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import re
import sys
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import optax

import jaxslowmo as js
from jaxslowmo.models import gpt_preset

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from gpu_estimates import read_estimate, text_with_estimates

from support.gpu_buckets import lowered_gpt, what_runs_beside
from support.gpu_hosts import gpu_mesh, memory_bandwidth
from support.gpu_schedule import read_gpu_schedule

GPU = "H100"
MIB = 2**20
FSDP = {1: {"replica": 2, "fsdp": 4}, 4: {"replica": 4, "fsdp": 8}}
EMITTED = re.compile(r"stablehlo\.(all_reduce|all_to_all|all_gather|reduce_scatter)")
TEXT = """# Buckets of gradients on H100s

jax {jax}, jax-cuda13-plugin {plugin}; `python benchmarks/gpu_buckets.py`. **Compiled only; nothing
ran on a GPU.**

The preset `124m` with {layers} blocks (float32 parameters, `js.gradients.Policy("bfloat16")`), 8
windows of 1024 bytes per GPU, host-scheduled. Unless the row says otherwise, the optimizer is AdamW
and `js.all_reduce_gradients` has its defaults. On 8 GPUs each is a replica, on 4 x 8 (4 hosts) each
of the 32 is. With `fsdp` 4 of 8 GPUs, or the 8 of each host, share a replica whose parameters are
split over them.

- *collectives*: how many the program asks for, and how many XLA makes of them.
- *backward*: share of the bytes that travel beside at least one product of the backward pass.
- *other*, *nothing*: MiB that travel beside other kernels alone (mostly the optimizer's), and
  beside no kernel.
- *estimated ms*: XLA's own estimates (`benchmarks/gpu_estimates.py`) of the time of all
  collectives; of the time for which kernels wait for them; and of the step. "-" where it makes
  none.
"""
COLUMNS = ("GPUs", "step", "collectives", "MiB", "backward", "other", "nothing")
TIMES = ("estimated ms: collectives", "exposed", "step")


@dataclass(frozen=True)
class Case:
    """A step to compile.

    Attributes:
      name: what is special about it.
      arguments: arguments of `js.all_reduce_gradients`.
      options: arguments of `lowered_gpt`.
      compiler_options: options of XLA.
      hosts: numbers of hosts on which it is compiled.
      is_sharded: whether replicas are sharded, over the axes `FSDP`.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    compiler_options: dict[str, Any] = field(default_factory=dict)
    hosts: tuple[int, ...] = (1,)
    is_sharded: bool = False


BOTH = (1, 4)
SEPARATE = {"xla_gpu_all_reduce_combine_threshold_bytes": 0}
CLIPPED = js.chain(js.clip_by_global_norm(1.0), optax.adamw(6e-4))
CASES = (
    Case("defaults", hosts=BOTH),
    Case('`order="reverse"`', {"order": "reverse"}, hosts=BOTH),
    Case("clipping by the global norm", options={"optimizer": CLIPPED}, hosts=BOTH),
    Case("SGD", options={"optimizer": optax.sgd(0.1)}, hosts=BOTH),
    Case("100 MiB", {"bucket_bytes": 100 * MIB}),
    Case("50 MiB", {"bucket_bytes": 50 * MIB}),
    Case("16 MiB", {"bucket_bytes": 16 * MIB}, hosts=BOTH),
    Case("8 MiB", {"bucket_bytes": 8 * MIB}),
    Case("5 MiB", {"bucket_bytes": 5 * MIB}),
    Case("5 MiB, kept separate", {"bucket_bytes": 5 * MIB}, compiler_options=SEPARATE, hosts=BOTH),
    Case(
        "two collectives in flight",
        compiler_options={"xla_gpu_experimental_parallel_collective_overlap_limit": 2},
    ),
    Case(
        "no latency-hiding scheduler",
        compiler_options={"xla_gpu_enable_analytical_sol_latency_estimator": False},
    ),
    Case("`js.hooks.bf16_compress()`", {"hook": js.hooks.bf16_compress()}, hosts=BOTH),
    Case("`js.hooks.int8()`", {"hook": js.hooks.int8()}),
    Case("`js.hooks.powersgd(4)`", {"hook": js.hooks.powersgd(4, start_step=2)}),
    Case("`accumulate=2`", options={"accumulate": 2}, hosts=BOTH),
    Case("last batch of `step.collect`", options={"windowed": True}, hosts=BOTH),
    Case("`fsdp`", hosts=BOTH, is_sharded=True),
)


def row(case: Case, num_hosts: int, num_layers: int | None) -> str:
    """Return the line of the table for one program."""
    config = gpt_preset("124m")
    if num_layers is not None:
        config = replace(config, num_layers=num_layers)
    axes = FSDP[num_hosts] if case.is_sharded else {"replica": 8 * num_hosts}
    mesh = gpu_mesh(axes, num_hosts=num_hosts, gpu=GPU)
    gradients = js.all_reduce_gradients("replica", **case.arguments)
    lowered = lowered_gpt(config, mesh, gradients, **case.options)
    text = text_with_estimates(lowered, case.compiler_options)
    schedule = read_gpu_schedule(text)
    transfers = schedule.transfers
    beside = what_runs_beside(transfers)
    in_branches = f" + {schedule.in_branches} in branches" if schedule.in_branches else ""
    numbers = f"{len(EMITTED.findall(lowered.as_text()))}, {len(transfers)}{in_branches}"
    sizes = (f"{size / MIB:.0f}" for size in (beside.other, beside.nothing))
    share = f"{beside.share:.0%}" if transfers else "-"
    try:
        times = read_estimate(text, memory_bandwidth(GPU))
        shown = [f"{time / 1000:.2f}" for time in (times.collectives, times.exposed, times.step)]
    except AssertionError:  # XLA writes none for some collectives, and none with some options
        shown = ["-"] * 3
    where = "8" if num_hosts == 1 else f"{num_hosts} x 8"
    return line([where, case.name, numbers, f"{beside.total / MIB:.0f}", share, *sizes, *shown])


def line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, help="number of blocks, if not the preset's")
    parser.add_argument("--only", default="", help="a part of the names of the rows to print")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines: list[str] = []

    def add(*more: str) -> None:
        lines.extend(more)
        print("\n".join(more), flush=True)

    layers = arguments.layers or gpt_preset("124m").num_layers
    plugin = version("jax-cuda13-plugin")
    add(TEXT.format(jax=jax.__version__, plugin=plugin, layers=layers))
    add(line((*COLUMNS, *TIMES)), line(["---"] * 2 + ["---:"] * 8))
    for case in CASES:
        for num_hosts in case.hosts if arguments.only in case.name else ():
            add(row(case, num_hosts, arguments.layers))
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
