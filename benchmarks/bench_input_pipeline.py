"""What js.TrainPipeline hides of a loader: milliseconds per step with it, without, and the least.

    python benchmarks/bench_input_pipeline.py --out benchmarks/results/bench_input_pipeline

A loader takes 0.5, 1 and 2 of the step's time, asleep or computing in NumPy on one core. The step
computes on another core of the host, or elsewhere: a thread that sleeps stands for a device that
leaves the host's cores alone. Loops take turns; each reads the loss of every step, as one with a
progress bar does. The least possible is max(load, step), of the same round. Last, one pipelined run
under the jax profiler: how much of each stage lies beside the step's own work.
"""

import argparse
import functools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--milliseconds", type=float, default=40, help="of a step, about")
PARSER.add_argument("--steps", type=int, default=25, help="timed per loop and round")
PARSER.add_argument("--rounds", type=int, default=7)
PARSER.add_argument("--depth", type=int, default=2)
PARSER.add_argument("--out", type=Path, help="path without suffix; .json and .md are added")
ARGS = PARSER.parse_args()
# One core for the step, one for the loader.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from machine import describe  # noqa: E402

import jaxslowmo as js  # noqa: E402

FRACTIONS = (0.5, 1.0, 2.0)
WARM = 3
ROWS, WIDTH = 256, 1024
STAGE, DEVICE = "jaxslowmo.input/", "device that stands elsewhere"
Load = Callable[[], None]


class StandIn:
    """A device that is not the host: one thread that sleeps for each step, in their order."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._queue = ThreadPoolExecutor(1)

    def place(self, batch: Any, weight: Any = None, *, state: Any = None) -> Any:
        del state
        return jax.device_put(batch), weight

    def _run(self) -> float:
        with jax.profiler.TraceAnnotation(DEVICE):
            time.sleep(self._seconds)
        return 0.0

    def __call__(self, state: Any, batch: Any) -> Any:
        self.place(batch)
        return state, {"loss": self._queue.submit(self._run)}


def a_step(kind: str, seconds: float) -> tuple[Any, Any]:
    """A step that computes on the host, or a stand-in, for about so long; and its state."""
    if kind == "elsewhere":
        return StandIn(seconds), {}
    layers = 1

    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        x = batch
        for _ in range(layers):
            x = jnp.tanh(x @ params["w"])
        return jnp.mean(x**2)

    def made() -> tuple[js.train.TrainStep, js.TrainState]:
        mesh = js.make_mesh({"replica": 1}, devices=jax.devices()[:1])
        step = js.make_train_step(loss, optax.sgd(0.01), sync="none", mesh=mesh)
        w = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
        return step, step.init({"w": w.astype(np.float32)})

    layers = max(1, round(seconds / time_of_steps(*made())))
    return made()


def read(metrics: dict[str, Any]) -> float:
    """The loss, when it is there."""
    loss = metrics["loss"]
    return loss.result() if isinstance(loss, Future) else float(loss[0])


def time_of_steps(step: Any, state: Any, steps: int = 10) -> float:
    """Seconds per step of a batch that is there."""
    batch, _ = step.place(np.ones((ROWS, WIDTH), np.float32))
    began = 0.0
    for i in range(steps + WARM):
        if i == WARM:
            began = time.perf_counter()
        state, metrics = step(state, batch)
        read(metrics)
    return (time.perf_counter() - began) / steps


def a_load(kind: str, seconds: float) -> Load:
    """What a loader does for a batch: sleeps, or computes in NumPy on one core."""
    if kind == "sleeps":
        return lambda: time.sleep(seconds)
    x = np.random.default_rng(0).normal(size=(1 << 16,)).astype(np.float32)

    def compute(times: int) -> None:
        for _ in range(times):
            np.sort(x)

    began = time.perf_counter()
    compute(20)
    times = max(1, round(20 * seconds / (time.perf_counter() - began)))
    return lambda: compute(times)


def batches(load: Load, count: int) -> Iterator[np.ndarray]:
    for i in range(count):
        load()
        yield np.full((ROWS, WIDTH), i, np.float32)


def of_loader(step: Any, state: Any, load: Load) -> float:
    """Seconds per batch of the loader alone."""
    del step, state
    began = time.perf_counter()
    for _ in batches(load, ARGS.steps):
        pass
    return (time.perf_counter() - began) / ARGS.steps


def of_step(step: Any, state: Any, load: Load) -> float:
    """Seconds per step alone."""
    del load
    return time_of_steps(step, state, ARGS.steps)


def of_both(step: Any, state: Any, load: Load) -> float:
    """The same of loader and step at once, each with batches of its own: what cores they share."""
    loading = threading.Thread(target=lambda: [load() for _ in range(ARGS.steps)])
    batch, _ = step.place(np.ones((ROWS, WIDTH), np.float32))
    began = 0.0
    for i in range(ARGS.steps + WARM):
        if i == WARM:
            began = time.perf_counter()
            loading.start()
        state, metrics = step(state, batch)
        read(metrics)
    loading.join()
    return (time.perf_counter() - began) / ARGS.steps


def of_plain(step: Any, state: Any, load: Load, every: bool = True) -> float:
    """Seconds per step of a loop that reads each loss.

    Or the last one alone, while jax starts steps and goes on.
    """
    began = time.perf_counter()
    for batch in batches(load, ARGS.steps):
        state, metrics = step(state, batch)
        if every:
            read(metrics)
    read(metrics)
    return (time.perf_counter() - began) / ARGS.steps


def of_pipeline(step: Any, state: Any, load: Load) -> float:
    """The same of a pipeline, once it runs: its first batch no step can hide."""
    count = ARGS.steps + WARM
    pipeline = js.TrainPipeline(step, state, batches(load, count), depth=ARGS.depth)
    for _ in range(WARM):
        read(next(pipeline).metrics)
    began = time.perf_counter()
    for result in pipeline:
        read(result.metrics)
    return (time.perf_counter() - began) / ARGS.steps


LOOPS = {
    "load": of_loader,
    "step": of_step,
    "both": of_both,
    "plain": of_plain,
    "unread": functools.partial(of_plain, every=False),
    "pipeline": of_pipeline,
}


def measured(kind: str, loader: str) -> list[dict[str, Any]]:
    """A row per fraction: medians over rounds in which all loops take turns."""
    step, state = a_step(kind, ARGS.milliseconds / 1000)
    fresh = lambda: jax.tree.map(jnp.copy, state)  # noqa: E731 - steps reuse its buffers
    alone = time_of_steps(step, fresh())
    rows = []
    for fraction in FRACTIONS:
        load = a_load(loader, alone * fraction)
        taken: dict[str, list[float]] = {name: [] for name in LOOPS}
        for _ in range(ARGS.rounds):
            for name, loop in LOOPS.items():
                taken[name].append(loop(step, fresh(), load))
        least = [max(pair) for pair in zip(taken["load"], taken["step"], strict=True)]
        row = {"kind": kind, "loader": loader, "fraction": fraction}
        row |= {name: round(1000 * statistics.median(t), 2) for name, t in taken.items()}
        for name, other in (("plain", taken["plain"]), ("both", taken["both"]), ("least", least)):
            ratios = [p / o for p, o in zip(taken["pipeline"], other, strict=True)]
            row[f"of {name}"] = round(statistics.median(ratios), 3)
        rows.append(row)
        print(row, flush=True)
    return rows


def traced(kind: str, loader: str) -> dict[str, Any]:
    """Of a pipelined run under the profiler: per stage its time, and how much beside the step."""
    step, state = a_step(kind, ARGS.milliseconds / 1000)
    alone = time_of_steps(step, jax.tree.map(jnp.copy, state))
    load = a_load(loader, alone / 2)
    source = batches(load, ARGS.steps + WARM)
    pipeline = js.TrainPipeline(step, state, source, depth=ARGS.depth)
    for _ in range(WARM):
        read(next(pipeline).metrics)
    waited = pipeline.report().waiting_seconds
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        for result in pipeline:
            read(result.metrics)
        jax.profiler.stop_trace()
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        host = next(plane for plane in data.planes if plane.name == "/host:CPU")
        events = [e for line in host.lines for e in line.events]
    spans = {name: spans_of(events, name) for name in ("load", "place", "step")}
    device = joined(
        [
            (e.start_ns, e.end_ns)
            for e in events
            if e.name == DEVICE or (kind == "computes" and "hlo_op" in dict(e.stats))
        ]
    )
    report = pipeline.report()
    return {
        "kind": kind,
        "loader": loader,
        "steps": len(spans["step"]),
        "device": round(sum(b - a for a, b in device) / len(spans["step"]) / 1e6, 2),
        "stages": {
            name: {
                "milliseconds": round(sum(b - a for a, b in found) / len(found) / 1e6, 3),
                "beside": round(beside(found, device), 3),
            }
            for name, found in spans.items()
        },
        "waited": round(1000 * (report.waiting_seconds - waited) / ARGS.steps, 2),
        "slowest": report.slowest,
    }


def spans_of(events: list[Any], name: str) -> list[tuple[float, float]]:
    return [(e.start_ns, e.end_ns) for e in events if e.name == STAGE + name]


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint spans that cover the same time."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def beside(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The share of `spans` during which one of the disjoint `others` is there, too."""
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans for c, d in others)
    return both / sum(b - a for a, b in spans)


def page(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        "# Batches ahead",
        "",
        f"`{result['command']}`, {machine['processor']}, {machine['cores']} cores, Python "
        f"{machine['python']}, jax {machine['jax']}; load average {result['load_average']} before, "
        "by other work.",
        "",
        f"Milliseconds per step, medians of {ARGS.rounds} rounds in which all loops take turns, "
        f"{ARGS.steps} steps each, depth {ARGS.depth}. `both`: loader and step at once, nothing "
        "between them. `plain` reads each loss, `unread` the last one, `pipeline` each. The last "
        "columns are medians of ratios of one round.",
        "",
        "| step | loader | load / step | load | step | both | plain | unread | pipeline | of plain "
        "| of both | of max(load, step) |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        numbers = [f"{row[name]:.1f}" for name in LOOPS]
        ratios = [f"{row['of plain']:.2f}", f"{row['of both']:.2f}", f"{row['of least']:.3f}"]
        cells = [row["kind"], row["loader"], f"{row['fraction']:g}", *numbers, *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Under the jax profiler, a loader that takes half of the step's time: milliseconds of each "
        "stage on the host, and the share of them during which the step runs on its device.",
        "",
        "| step | loader | on its device | load | beside | place | beside | call | waited |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["traces"]:
        stages = row["stages"]
        cells = [row["kind"], row["loader"], f"{row['device']:.1f}"]
        for name in ("load", "place"):
            cells += [f"{stages[name]['milliseconds']:.2f}", f"{stages[name]['beside']:.0%}"]
        cells += [f"{stages['step']['milliseconds']:.2f}", f"{row['waited']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    load_average = round(os.getloadavg()[0], 1)
    kinds, loaders = ("elsewhere", "computes"), ("sleeps", "computes")
    pairs = [(kind, loader) for kind in kinds for loader in loaders]
    first = "chrt -r 10 " if os.sched_getscheduler(0) == os.SCHED_RR else ""
    result = {
        "command": f"{first}python benchmarks/bench_input_pipeline.py --rounds {ARGS.rounds} "
        f"--steps {ARGS.steps}",
        "arguments": {k: v for k, v in vars(ARGS).items() if k != "out"},
        "machine": describe(),
        "load_average": load_average,
        "rows": [row for pair in pairs for row in measured(*pair)],
        "traces": [traced(*pair) for pair in pairs],
    }
    print(page(result))
    if ARGS.out:
        ARGS.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        ARGS.out.with_suffix(".md").write_text(page(result))


if __name__ == "__main__":
    main()
