"""What a pipeline costs beside the model on one device, what it holds, and how long it compiles.

    python benchmarks/bench_pipeline.py --out benchmarks/results/bench_pipeline

A GPT of bytes over four CPU devices; `--platform` names others. Every way computes the same loss
and gradients of the same batch; they take turns, a ratio is to the first of them in the same round,
and a cell is the median over rounds. One way is GPipe as it is written by hand for equal layers,
differentiated by `jax.grad`. Compiling is measured in processor time. All CPU devices share the
cores of one machine, so that work is only divided, never done by more hardware: a ratio tells what
dispatch, copies and waiting add to the work, and nothing of the speed of a pipeline. An idle device
leaves its core to the others, so bubbles hardly show.
"""

import argparse
import json
import os
import shlex
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--stages", type=int, default=4)
PARSER.add_argument("--blocks", type=int, default=8)
PARSER.add_argument("--width", type=int, default=64)
PARSER.add_argument("--context", type=int, default=64)
PARSER.add_argument("--microbatches", type=int, default=16)
PARSER.add_argument("--examples", type=int, default=2, help="of a microbatch")
PARSER.add_argument("--rounds", type=int, default=5)
PARSER.add_argument("--only", nargs="+", help="beside the first, ways that contain one of these")
PARSER.add_argument("--compile", type=int, nargs="*", default=[4, 16, 64], help="microbatches")
PARSER.add_argument("--compile-blocks", type=int, nargs="*", default=[16, 64])
PARSER.add_argument("--compile-rounds", type=int, default=2)
PARSER.add_argument("--platform", default="cpu", help="such as cuda,cpu, with a device per stage")
PARSER.add_argument("--out", type=Path, help="path without suffix; .json and .md are added")
ARGS = PARSER.parse_args()

import jax  # noqa: E402

jax.config.update("jax_platforms", ARGS.platform)
if ARGS.platform == "cpu":
    jax.config.update("jax_num_cpu_devices", ARGS.stages)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from machine import describe  # noqa: E402

import jaxslowmo as js  # noqa: E402
from jaxslowmo.models import GPTConfig, gpt_layers, init_gpt  # noqa: E402

STEPS = (
    "Loss and gradients of one batch, median of {} rounds in which all take turns; the ratios are "
    "to the first row in the same round. Compiled: seconds of processor time of the first call, "
    "which traces and compiles, without those of a step. KB: parameters on the fullest device, and "
    "those of the layers of the largest stage."
)
SHARED = (
    " The devices share the cores: a ratio tells what dispatch, copies and waiting add to the same "
    "work, not how fast a pipeline is. Waiting threads spin, which is processor time, too."
)
COMPILED = (
    "Seconds of processor time until a program is lowered and until it is compiled, medians of {} "
    "runs; their sum, and the length of the lowered text, beside the first row."
)
HEADER = ["", "ms", "ratio", "of processor time", "compiled", "KB on a device", "largest stage"]
CELLS = (
    ("milliseconds", ".0f"),
    ("ratio", ".2f"),
    ("processor_ratio", ".2f"),
    ("compile_seconds", ".1f"),
    ("held_kilobytes", ",.0f"),
    ("largest_stage_kilobytes", ",.0f"),
)
BASE = "no pipeline: one device, microbatch by microbatch"
NAMES = {
    "gpipe": "GPipe",
    "one_f_one_b": "1F1B",
    "interleaved": "interleaved, 2 chunks",
    "zero_bubble": "ZB-H1",
    "zbv": "ZB-V",
    "lockstep": "lockstep",
}
ON_HOST = ("gpipe", "one_f_one_b", "zero_bubble")


class Way(NamedTuple):
    """A way to compute loss and gradients.

    Attributes:
      run: gives both.
      params: parameters as it takes them.
      largest: bytes of the parameters of its largest stage.
    """

    run: Callable[[], Any]
    params: Any
    largest: int


class Bench:
    """A GPT of so many blocks, and a batch of so many microbatches."""

    def __init__(self, blocks: int, microbatches: int) -> None:
        config = GPTConfig(
            num_layers=blocks, num_heads=4, embed_dim=ARGS.width, context_length=ARGS.context
        )
        parts = gpt_layers(config)
        self.model = js.LayeredModel(parts.layers, parts.loss)
        self.params = parts.split(init_gpt(config))
        self.microbatches = microbatches
        self.mesh = js.make_mesh({"stage": ARGS.stages})
        shape = microbatches * ARGS.examples, ARGS.context + 1
        self.batch = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)

    def one_by_one(self, params: Any, batch: jax.Array) -> Any:
        """Loss and gradients of microbatches in a scan, as one device accumulates them."""
        differentiate = jax.value_and_grad(self.model)

        def add(total: Any, microbatch: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, differentiate(params, microbatch)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = lax.scan(add, zeros, batch.reshape(self.microbatches, ARGS.examples, -1))
        return jax.tree.map(lambda x: x / self.microbatches, total)

    def by_hand(self) -> tuple[Any, Any, int]:
        """GPipe for equal layers: loss and gradients, parameters on the mesh, the largest stage."""
        (embed, block, *_), head = self.model.layers, self.model.layers[-1]
        p, m = ARGS.stages, self.microbatches

        def stage(params: Any, batch: jax.Array) -> jax.Array:
            (first, blocks, last), here = params, lax.axis_index("stage")

            def tick(carry: Any, t: jax.Array) -> tuple[Any, None]:
                x, total = carry
                x = jnp.where(here == 0, embed(first, batch[jnp.minimum(t, m - 1)]), x)
                x, _ = lax.scan(lambda x, own: (block(own, x), None), x, blocks)
                loss = self.model.loss(head(last, x), batch[jnp.maximum(t - p + 1, 0)])
                total += jnp.where((here == p - 1) & (t >= p - 1), loss, 0)
                return (lax.ppermute(x, "stage", [(i, (i + 1) % p) for i in range(p)]), total), None

            start = jnp.zeros((ARGS.examples, ARGS.context, ARGS.width)) * here, 0.0 * here
            (_, total), _ = lax.scan(tick, start, jnp.arange(m + p - 1))
            return lax.psum(total, "stage") / m

        specs = P(), P("stage"), P()
        mapped = jax.shard_map(stage, mesh=self.mesh, in_specs=(specs, P()), out_specs=P())
        first, *blocks, last = self.params
        trees = first, jax.tree.map(lambda *x: np.stack(x), *blocks), last
        pairs = zip(trees, specs, strict=True)
        placed = tuple(jax.device_put(x, NamedSharding(self.mesh, s)) for x, s in pairs)
        run = jax.value_and_grad(
            lambda params, batch: mapped(params, batch.reshape(m, ARGS.examples, -1))
        )
        return run, placed, size_of(blocks) // p + max(size_of(first), size_of(last))

    def staged(self, kind: str, executor: Any = "one_program") -> tuple[Any, Any, int]:
        """The same of `js.pipelined`."""
        chunks = 2 if kind == "interleaved" else None
        schedule = js.schedules.by_name(kind, ARGS.stages, self.microbatches, chunks)
        costs = js.pipeline.count_layer_params(self.params)
        parts = js.partition_by_cost(costs, ARGS.stages, schedule.num_chunks)
        pipe = js.pipelined(
            self.model, self.params, schedule, parts=parts, mesh=self.mesh, executor=executor
        )
        layout = pipe.layout
        stages = [0] * ARGS.stages
        for (start, end), stage in zip(layout.blocks, layout.placement, strict=True):
            stages[stage] += size_of(self.params[start:end])
        return jax.value_and_grad(pipe), layout.stack(self.params), max(stages)

    def ways(self) -> dict[str, Way]:
        """All by name; a program is traced and compiled when it is first called."""
        whole = size_of(self.params)
        in_one = jax.value_and_grad(self.model), self.params, whole
        makers: dict[str, Callable[[], tuple[Any, Any, int]]] = {
            BASE: lambda: (self.one_by_one, self.params, whole),
            "no pipeline: one device, the whole batch at once": lambda: in_one,
            "by hand, GPipe": self.by_hand,
        }
        makers |= {f"one program, {name}": partial(self.staged, k) for k, name in NAMES.items()}
        makers |= {f"host, {NAMES[kind]}": partial(self.staged, kind, "host") for kind in ON_HOST}
        wanted = (BASE, *(ARGS.only or makers))
        ways = {}
        for name, make in makers.items():
            if any(w in name for w in wanted):
                fn, params, largest = make()
                run = fn if name.startswith("host") else jax.jit(fn)
                ways[name] = Way(partial(run, params, self.batch), params, largest)
        return ways


def size_of(tree: Any) -> int:
    """Bytes of arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def held(tree: Any) -> int:
    """Bytes on the device that holds most."""
    on: dict[Any, int] = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards if isinstance(x, jax.Array) else ():
            on[shard.device] = on.get(shard.device, 0) + shard.data.nbytes
    return max(on.values(), default=size_of(tree))


def seconds(fn: Callable[[], Any]) -> tuple[float, float]:
    """Until the results are there; and processor time of all threads until then."""
    began, worked = time.perf_counter(), time.process_time()
    jax.block_until_ready(fn())
    return time.perf_counter() - began, time.process_time() - worked


def step_times(bench: Bench) -> dict[str, dict[str, Any]]:
    """Every way in turn; the losses are equal."""
    found = bench.ways()
    first = {name: seconds(way.run)[1] for name, way in found.items()}
    losses = [float(np.ravel(way.run()[0])[0]) for way in found.values()]
    # GPUs compute products of float32 in TF32.
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5 if ARGS.platform == "cpu" else 1e-2)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for _ in range(ARGS.rounds):
        for name, way in found.items():
            times[name].append(seconds(way.run))
    return {
        name: {
            "milliseconds": 1e3 * statistics.median(wall for wall, _ in own),
            "ratio": _ratio(own, times[BASE], 0),
            "processor_ratio": _ratio(own, times[BASE], 1),
            "compile_seconds": first[name] - statistics.median(worked for _, worked in own),
            "held_kilobytes": held(found[name].params) / 1e3,
            "largest_stage_kilobytes": found[name].largest / 1e3,
            "wall_and_processor_seconds": own,
        }
        for name, own in times.items()
    }


def _ratio(own: list[tuple[float, float]], base: list[tuple[float, float]], which: int) -> float:
    """The median over rounds."""
    return statistics.median(t[which] / b[which] for t, b in zip(own, base, strict=True))


def compile_times(cases: Iterable[tuple[str, int, int]]) -> list[dict[str, Any]]:
    """Return processor time and length of the text, by blocks and microbatches."""
    rows = []
    for way, blocks, microbatches in cases:
        runs = []
        for _ in range(ARGS.compile_rounds):
            jax.clear_caches()
            bench = Bench(blocks, microbatches)
            fn, params, _ = bench.by_hand() if way == "by hand" else bench.staged(way)
            began = time.process_time()
            lowered = jax.jit(fn).lower(params, bench.batch)
            traced = time.process_time()
            lowered.compile()
            done = time.process_time()
            runs.append((traced - began, done - traced, len(lowered.as_text())))
        trace, compiled, characters = map(statistics.median, zip(*runs, strict=True))
        row = {"way": way, "blocks": blocks, "microbatches": microbatches}
        times = {"trace_seconds": trace, "compile_seconds": compiled, "characters": characters}
        rows.append({**row, **times})
    return rows


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
    where = ", ".join(
        (
            f"`{result['command']}`",
            machine["processor"],
            f"{machine['cores']} cores",
            f"load average {machine['load']:.1f} at the start",
            f"Python {machine['python']}",
            f"jax {machine['jax']}",
            f"{machine['devices']}.",
        )
    )
    shared = SHARED if settings["platform"] == "cpu" else ""
    model = (
        f"A GPT of {settings['blocks']} blocks of width {settings['width']}, "
        f"{settings['context']} bytes, {m} microbatches of {settings['examples']} examples, "
        f"{p} stages. "
    )
    parts = [
        "# Pipelines on one machine",
        where,
        model + STEPS.format(settings["rounds"]) + shared,
        table(HEADER, steps),
    ]
    if result["compile"]:
        parts += compiled_parts(result["compile"], settings["compile_rounds"])
    return "\n\n".join(parts) + "\n"


def compiled_parts(rows: list[dict[str, Any]], rounds: int) -> list[str]:
    """Return the text and the table of how long programs compile."""
    first, *_ = rows
    cells = [
        [
            "by hand, GPipe" if row["way"] == "by hand" else f"one program, {NAMES[row['way']]}",
            *(str(row[name]) for name in ("blocks", "microbatches")),
            *(f"{row[name]:.2f}" for name in ("trace_seconds", "compile_seconds")),
            f"{_both(row) / _both(first):.2f}",
            f"{row['characters'] / first['characters']:.3f}",
        ]
        for row in rows
    ]
    header = ["", "blocks", "microbatches", "traced", "compiled", "together", "text"]
    return [COMPILED.format(rounds), table(header, cells)]


def _both(row: dict[str, float]) -> float:
    return row["trace_seconds"] + row["compile_seconds"]


def main() -> None:
    load = os.getloadavg()[0]
    settings = {name: value for name, value in vars(ARGS).items() if name != "out"}
    changed = [
        f"--{name.replace('_', '-')} {shlex.join(map(str, np.atleast_1d(value)))}".strip()
        for name, value in settings.items()
        if value != PARSER.get_default(name)
    ]
    cases = [("one_f_one_b", ARGS.blocks, m) for m in ARGS.compile]
    for way in ("one_f_one_b", "by hand"):
        cases += [(way, blocks, ARGS.microbatches) for blocks in ARGS.compile_blocks]
    result = {
        "command": " ".join(["python benchmarks/bench_pipeline.py", *changed]),
        "machine": {**describe(), "load": load},
        "settings": settings,
        "steps": step_times(Bench(ARGS.blocks, ARGS.microbatches)),
        "compile": compile_times(cases),
    }
    print(report(result))
    if ARGS.out is not None:
        ARGS.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        ARGS.out.with_suffix(".md").write_text(report(result), "utf-8")


if __name__ == "__main__":
    main()
