"""What a pipeline of stages costs beside the model on one device, and how long it compiles.

    python benchmarks/bench_pipeline.py --out benchmarks/results/bench_pipeline

A GPT of bytes over four CPU devices. Every way computes the same loss and gradients of the same
batch; they take turns, a ratio is to the first of them in the same round, and a cell is the median
over rounds. Compiling is measured in processor time. All devices share the cores of one machine, so
that work is only divided, never done by more hardware: a ratio tells what dispatch, copies and
waiting add to the work, and nothing of the speed of a pipeline. An idle device leaves its core to
the others, so bubbles hardly show.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--stages", type=int, default=4)
PARSER.add_argument("--blocks", type=int, default=8)
PARSER.add_argument("--width", type=int, default=64)
PARSER.add_argument("--context", type=int, default=64)
PARSER.add_argument("--microbatches", type=int, default=16)
PARSER.add_argument("--examples", type=int, default=2, help="of a microbatch")
PARSER.add_argument("--rounds", type=int, default=5)
PARSER.add_argument("--compile", type=int, nargs="+", default=[4, 16, 64], help="microbatches")
PARSER.add_argument("--compile-rounds", type=int, default=2)
PARSER.add_argument("--out", type=Path, help="path without suffix; .json and .md are added")
ARGS = PARSER.parse_args()

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", ARGS.stages)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from machine import describe  # noqa: E402

import jaxslowmo as js  # noqa: E402
from jaxslowmo.models import GPTConfig, gpt_layers, init_gpt  # noqa: E402

CONFIG = GPTConfig(
    num_layers=ARGS.blocks, num_heads=4, embed_dim=ARGS.width, context_length=ARGS.context
)
PARTS = gpt_layers(CONFIG)
MODEL = js.LayeredModel(PARTS.layers, PARTS.loss)
STEPS = (
    "Loss and gradients of one batch, median of {} rounds in which all take turns; the ratios are "
    "to the first row in the same round. The devices share the cores: a ratio tells what dispatch, "
    "copies and waiting add to the same work, not how fast a pipeline is. Waiting threads spin, "
    "which is processor time, too."
)
COMPILED = (
    "The one program of 1F1B by microbatches: seconds of processor time until it is lowered and "
    "until it is compiled, medians of {} runs; their sum, and the length of the lowered text, "
    "beside the first row."
)
CELLS = (("milliseconds", ".0f"), ("ratio", ".2f"), ("processor_ratio", ".2f"))
BASE = "no pipeline: one device, microbatch by microbatch"


def parameters() -> list[Any]:
    """One tree per layer."""
    return PARTS.split(init_gpt(CONFIG))


def batch_of(microbatches: int) -> np.ndarray:
    """Random bytes."""
    shape = (microbatches * ARGS.examples, ARGS.context + 1)
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def one_by_one(params: Any, batch: jax.Array) -> Any:
    """Loss and gradients of microbatches in a scan, as one device accumulates them."""
    differentiate = jax.value_and_grad(MODEL)

    def add(total: Any, microbatch: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, differentiate(params, microbatch)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    parts = batch.reshape(ARGS.microbatches, ARGS.examples, -1)
    total, _ = jax.lax.scan(add, zeros, parts)
    return jax.tree.map(lambda x: x / ARGS.microbatches, total)


def ways(params: list[Any], batch: np.ndarray) -> dict[str, Callable[[], Any]]:
    """By name a function that gives loss and gradients, once per call."""
    p, m = ARGS.stages, ARGS.microbatches
    mesh = js.make_mesh({"stage": p})
    schedules = js.schedules
    alone = jax.jit(one_by_one)
    whole = jax.jit(jax.value_and_grad(MODEL))
    found: dict[str, Callable[[], Any]] = {
        BASE: lambda: alone(params, batch),
        "no pipeline: one device, the whole batch at once": lambda: whole(params, batch),
    }
    for name, schedule in (
        ("1F1B", schedules.one_f_one_b(p, m)),
        ("lockstep", schedules.lockstep(p, m)),
    ):
        pipe = js.pipelined(MODEL, params, schedule, mesh=mesh)
        run = jax.jit(jax.value_and_grad(pipe.loss_fn))
        found[f"one program, {name}"] = partial(run, pipe.layout.stack(params), batch)
    for name, schedule in (
        ("GPipe", schedules.gpipe(p, m)),
        ("1F1B", schedules.one_f_one_b(p, m)),
        ("ZB-H1", schedules.zero_bubble(p, m)),
    ):
        host = js.HostPipeline(MODEL, params, schedule, mesh=mesh)
        found[f"host, {name}"] = partial(host.value_and_grad, host.place(params), batch)
    return found


def seconds(fn: Callable[[], Any]) -> tuple[float, float]:
    """Until the results are there; and processor time of all threads until then."""
    began, worked = time.perf_counter(), time.process_time()
    jax.block_until_ready(fn())
    return time.perf_counter() - began, time.process_time() - worked


def step_times(params: list[Any]) -> dict[str, dict[str, Any]]:
    """Every way in turn; the losses are equal."""
    found = ways(params, batch_of(ARGS.microbatches))
    losses = {name: float(np.ravel(fn()[0])[0]) for name, fn in found.items()}  # compiles, too
    np.testing.assert_allclose(list(losses.values()), losses[BASE], rtol=1e-5)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for _ in range(ARGS.rounds):
        for name, fn in found.items():
            times[name].append(seconds(fn))
    return {
        name: {
            "milliseconds": 1e3 * statistics.median(wall for wall, _ in own),
            "ratio": _ratio(own, times[BASE], 0),
            "processor_ratio": _ratio(own, times[BASE], 1),
            "wall_and_processor_seconds": own,
        }
        for name, own in times.items()
    }


def _ratio(own: list[tuple[float, float]], base: list[tuple[float, float]], which: int) -> float:
    """The median over rounds."""
    return statistics.median(t[which] / b[which] for t, b in zip(own, base, strict=True))


def compile_times(params: list[Any]) -> dict[str, dict[str, float]]:
    """Of the one program by number of microbatches: processor time, and length of its text."""
    mesh = js.make_mesh({"stage": ARGS.stages})
    found: dict[str, list[tuple[float, float, int]]] = {str(m): [] for m in ARGS.compile}
    for _ in range(ARGS.compile_rounds):
        for m in ARGS.compile:
            jax.clear_caches()
            schedule = js.schedules.one_f_one_b(ARGS.stages, m)
            pipe = js.pipelined(MODEL, params, schedule, mesh=mesh)
            stacked, batch = pipe.layout.stack(params), batch_of(m)
            began = time.process_time()
            lowered = jax.jit(jax.value_and_grad(pipe.loss_fn)).lower(stacked, batch)
            traced = time.process_time()
            lowered.compile()
            done = time.process_time()
            found[str(m)].append((traced - began, done - traced, len(lowered.as_text())))
    names = ("trace_seconds", "compile_seconds", "characters")
    return {
        m: {n: statistics.median(run[i] for run in runs) for i, n in enumerate(names)}
        for m, runs in found.items()
    }


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(result: dict[str, Any]) -> str:
    """The result as a page."""
    machine, settings = result["machine"], result["settings"]
    p, m = settings["stages"], settings["microbatches"]
    steps = [
        [name, *(f"{row[n]:{form}}" for n, form in CELLS)] for name, row in result["steps"].items()
    ]
    first = next(iter(result["compile"].values()))
    compiled = [
        [
            m,
            *(f"{row[name]:.2f}" for name in ("trace_seconds", "compile_seconds")),
            f"{_both(row) / _both(first):.2f}",
            f"{row['characters'] / first['characters']:.3f}",
        ]
        for m, row in result["compile"].items()
    ]
    where = ", ".join(
        (
            f"`{result['command']}`",
            machine["processor"],
            f"{machine['cores']} cores",
            f"Python {machine['python']}",
            f"jax {machine['jax']}",
            f"{machine['devices']}.",
        )
    )
    model = (
        f"A GPT of {settings['blocks']} blocks of width {settings['width']}, "
        f"{settings['context']} bytes, {m} microbatches of {settings['examples']} examples, "
        f"{p} stages. "
    )
    parts = [
        "# Pipelines on one machine",
        where,
        model + STEPS.format(settings["rounds"]),
        table(["", "ms", "ratio", "of processor time"], steps),
        COMPILED.format(settings["compile_rounds"]),
        table(["microbatches", "traced", "compiled", "together", "text"], compiled),
    ]
    return "\n\n".join(parts) + "\n"


def _both(row: dict[str, float]) -> float:
    return row["trace_seconds"] + row["compile_seconds"]


def main() -> None:
    params = parameters()
    settings = {name: value for name, value in vars(ARGS).items() if name != "out"}
    changed = [
        f"--{name.replace('_', '-')} {' '.join(map(str, np.atleast_1d(value)))}"
        for name, value in settings.items()
        if value != PARSER.get_default(name)
    ]
    result = {
        "command": " ".join(["python benchmarks/bench_pipeline.py", *changed]),
        "machine": describe(),
        "settings": settings,
        "steps": step_times(params),
        "compile": compile_times(params),
    }
    print(report(result))
    if ARGS.out is not None:
        ARGS.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        ARGS.out.with_suffix(".md").write_text(report(result), "utf-8")


if __name__ == "__main__":
    main()
