"""Measure how long tracing an update, compiling a step and starting a step take.

    git worktree add /tmp/before <commit>
    python benchmarks/bench_tracing.py --before /tmp/before --out benchmarks/results/bench_tracing

Every number is processor time (of the calling thread; of all where the compiler works), so that
other work on the machine counts little. Trees take turns, each in processes of its own; what a
process does for the first time was done before, with a few leaves. A cell is the least over all
rounds; medians are in the JSON.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve()
PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--leaves", type=int, nargs="+", default=[250, 1000, 4000])
PARSER.add_argument("--before", type=Path, help="checkout of an older commit, measured as well")
PARSER.add_argument("--rounds", type=int, default=2)
PARSER.add_argument("--calls", type=int, default=20, help="timed steps per round")
PARSER.add_argument("--replicas", type=int, default=4)
PARSER.add_argument("--only", default="", help="cells whose name holds this")
PARSER.add_argument("--out", type=Path, help="path without suffix; .json and .md are added")
PARSER.add_argument("--measure", type=int, help=argparse.SUPPRESS)  # in a process of its own
PARSER.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)  # steps, not updates
ARGS = PARSER.parse_args()

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", ARGS.replicas)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from by_hand import averaged_by_hand  # noqa: E402
from machine import describe  # noqa: E402

import jaxslowmo as js  # noqa: E402

WARM_UP = 8  # leaves
COMPILED = 1000  # of more leaves the compiler would take minutes
TRACED, COMPILING = "a step, traced and lowered: ", "a step, compiled: "
CALLED = "a step: called, not waited for"
PLAIN = "a plain jitted program of the same parameters, called"


class Cell(NamedTuple):
    """A transform, whose update is traced, and the phases for which it is."""

    tx: optax.GradientTransformation
    phases: tuple[Any, ...] = ()


def cells() -> dict[str, Cell]:
    """By name; those of a transform of ours are without an optimizer where none is named."""
    adam, reduce = optax.adam(1e-3), js.all_reduce_gradients("replica")
    in_eight = js.all_reduce_gradients(
        "replica", bucket_bytes=0, first_bucket_bytes=0, max_buckets=8
    )
    found = {
        "nothing": Cell(optax.identity()),
        "optax.adam": Cell(adam),
        "all_reduce_gradients": Cell(reduce),
        "all_reduce_gradients, max_buckets=8": Cell(in_eight),
        "all_reduce_gradients, adam": Cell(optax.chain(reduce, adam)),
        "accumulate(all_reduce_gradients)": Cell(js.gradients.accumulate(reduce, every=4)),
        "accumulate(all_reduce_gradients, adam)": Cell(
            js.gradients.accumulate(optax.chain(reduce, adam), every=4)
        ),
    }
    local_sgd = js.local_sgd("replica", sync_every=3)
    synced = {
        "local_sgd": local_sgd,
        "sgp": js.sgp("replica").bound({"replica": ARGS.replicas}),
        "slowmo over local_sgd": js.slowmo("replica", base=local_sgd, sync_every=12),
        "slowmo over local_sgd, unsharded": js.slowmo(
            "replica", base=local_sgd, sync_every=12, shard_state=False
        ),
        "diloco": js.diloco("replica", sync_every=12),
    }
    for name, sync in synced.items():
        found[f"{name}: traced"] = Cell(sync)
        found[f"{name}: host"] = Cell(sync, tuple(sync.phases()))
    return found


def steps() -> dict[str, dict[str, Any]]:
    """Arguments of the step, by name; the first two are what others are compared with."""
    local_sgd = js.local_sgd("replica", sync_every=3)
    slowmo = partial(js.slowmo, "replica", base=local_sgd, sync_every=12)
    synced = {
        "local_sgd": local_sgd,
        "slowmo over local_sgd": slowmo(),
        "slowmo over local_sgd, unsharded": slowmo(shard_state=False),
        "sgp": js.sgp("replica"),
    }
    return {
        "no exchange": {"sync": "none"},
        "an exchange by hand": {"sync": averaged_by_hand("replica")},
        "all_reduce_gradients": {"gradients": js.all_reduce_gradients("replica")},
        **{
            f"{name}: {mode}": {"sync": sync, "mode": mode}
            for name, sync in synced.items()
            for mode in ("traced", "host")
        },
    }


def shapes_of(leaves: int) -> Any:
    """Of one copy of the parameters, nested like those of a model."""
    names = ("query", "key", "value", "out")
    leaf = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return {
        f"layer_{i}": {"attention": dict.fromkeys(names[: min(4, leaves - i)], leaf)}
        for i in range(0, leaves, 4)
    }


def stacked(types: Any) -> Any:
    """With a leading axis of replicas."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((ARGS.replicas, *x.shape), x.dtype), types)


def mapped(fn: Callable[..., Any], mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    """`fn` of one replica's trees, of stacked trees."""

    def per_device(*args: Any) -> Any:
        out = fn(*jax.tree.map(lambda x: jax.lax.reshape(x, x.shape[1:]), args))
        return jax.tree.map(lambda x: jax.lax.expand_dims(x, (0,)), out)

    specs = {"in_specs": jax.P("replica"), "out_specs": jax.P("replica")}
    return jax.shard_map(per_device, mesh=mesh, **specs)


def placed(types: Any, mesh: jax.sharding.Mesh) -> Any:
    """Arrays of these types, one entry of the leading axis on each device."""
    sharding = jax.NamedSharding(mesh, jax.P("replica"))

    def make(x: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.split(jax.random.key(0), x.shape), sharding)
        return jax.device_put(np.zeros(x.shape, x.dtype), sharding)

    return jax.tree.map(make, types)


def seconds(fn: Callable[[], Any]) -> float:
    """Processor time of this thread."""
    gc.collect()
    start = time.thread_time()
    fn()
    return time.thread_time() - start


def trace_seconds(cell: Cell, leaves: int) -> float:
    """Of one update; of all programs together where phases are given."""
    mesh = js.make_mesh({"replica": ARGS.replicas})
    params = stacked(shapes_of(leaves))
    state = jax.eval_shape(mapped(cell.tx.init, mesh), params)

    def program(**phase: Any) -> Any:
        return jax.jit(mapped(lambda g, s, p: cell.tx.update(g, s, p, **phase), mesh))

    programs = [program(phase=phase) for phase in cell.phases] or [program()]
    return seconds(lambda: [p.trace(params, state, params) for p in programs])


def loss(params: Any, batch: jax.Array) -> jax.Array:
    """As little as uses every leaf."""
    flat = [jax.lax.reshape(x, (x.size,)) for x in jax.tree.leaves(params)]
    return jnp.mean(batch) * jnp.sum(jax.lax.concatenate(flat, 0))


def squares(params: Any, batch: jax.Array) -> jax.Array:
    """A loss of equal work on every leaf."""
    return jnp.mean(batch) * sum(jnp.sum(jax.lax.square(x)) for x in jax.tree.leaves(params))


def step_seconds(parts: dict[str, Any], leaves: int) -> tuple[float, float, int]:
    """Return seconds to trace and lower, and to compile, all programs, and how many these are."""
    mesh = js.make_mesh({"replica": ARGS.replicas})
    step = js.make_train_step(squares, optax.sgd(0.1), mesh=mesh, **parts)
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes_of(leaves))
    state, batch = step.init(params), np.zeros((8 * ARGS.replicas,), np.float32)
    gc.collect()
    start = time.process_time()
    lowered = [traced.lower() for traced in step.traced_by_phase(state, batch).values()]
    traced = time.process_time()
    for program in lowered:
        program.compile()
    return traced - start, time.process_time() - traced, len(lowered)


def start_seconds(leaves: int) -> dict[str, list[float]]:
    """Until a step is on its way, devices having nothing else to do."""
    sync = js.local_sgd("replica", sync_every=10**6)
    mesh = js.make_mesh({"replica": ARGS.replicas})

    def step_on(mesh: Any) -> Any:
        return js.make_train_step(loss, optax.identity(), mesh=mesh, sync=sync, mode="host")

    step, virtual = step_on(mesh), step_on(js.virtual_mesh({"replica": ARGS.replicas}))
    state = jax.eval_shape(virtual.init, shapes_of(leaves))
    state, batch = placed((state, jax.ShapeDtypeStruct((8 * ARGS.replicas,), jnp.float32)), mesh)
    took = {CALLED: [], PLAIN: []}
    plain = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.5, tree), donate_argnums=0)
    params = jax.tree.map(jnp.copy, state.params)
    # The first ones compile, and find caches empty.
    for _ in range(ARGS.calls + 2) if leaves <= COMPILED else ():
        start = time.thread_time()
        state, metrics = step(state, batch)
        took[CALLED].append(time.thread_time() - start)
        jax.block_until_ready((state, metrics))
        start = time.thread_time()
        params = plain(params)
        took[PLAIN].append(time.thread_time() - start)
        jax.block_until_ready(params)
    return {name: times[2:] for name, times in took.items() if times}


def measure(leaves: int) -> None:
    """In a process of its own: print every cell's seconds, as JSON."""
    found: dict[str, Any] = {}
    for name, parts in steps().items() if ARGS.compile and leaves <= COMPILED else ():
        if ARGS.only in f"{TRACED}{name} {COMPILING}{name}":
            step_seconds(parts, WARM_UP)
            traced, compiled, programs = step_seconds(parts, leaves)
            found[TRACED + name] = {"seconds": [traced], "programs": programs}
            found[COMPILING + name] = {"seconds": [compiled], "programs": programs}
    for name, cell in () if ARGS.compile else cells().items():
        if ARGS.only in name:
            trace_seconds(cell, WARM_UP)
            took = trace_seconds(cell, leaves)
            found[name] = {"seconds": [took], "programs": max(1, len(cell.phases))}
    if not ARGS.compile and any(ARGS.only in name for name in (CALLED, PLAIN)):
        found |= {name: {"seconds": took} for name, took in start_seconds(leaves).items()}
    print(json.dumps({"from": js.__file__, "cells": found}))


def in_process(tree: Path, leaves: int, *, compiled: bool) -> dict[str, Any]:
    """Measure, by this script, the package in `tree`: its updates, or its compiled steps."""
    command = [sys.executable, str(HERE), "--measure", str(leaves)]
    command += ["--compile"] if compiled else []
    for option in ("calls", "replicas", "only"):
        command += [f"--{option}", str(getattr(ARGS, option))]
    # The quality of steps that are only started does not matter.
    quick = "" if compiled else "--xla_backend_optimization_level=0"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {quick}"
    env = {**os.environ, "PYTHONPATH": str(tree), "XLA_FLAGS": flags.strip()}
    done = subprocess.run(command, env=env, cwd=tree, stdout=subprocess.PIPE, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    if not Path(answer["from"]).resolve().is_relative_to(tree):
        raise SystemExit(f"{tree} was to be measured, and {answer['from']} was imported.")
    return answer["cells"]


def commit_of(tree: Path) -> str:
    """Its short name, with "+" where files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tree), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "jaxslowmo")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def _command() -> str:
    """What was asked for; which commit `before` is, is said beside it."""
    sizes = " ".join(map(str, ARGS.leaves))
    before = "--before CHECKOUT " if ARGS.before else ""
    only = f" --only {ARGS.only!r}" if ARGS.only else ""
    return (
        f"python benchmarks/bench_tracing.py {before}--rounds {ARGS.rounds} --leaves {sizes}{only}"
    )


def run() -> dict[str, Any]:
    """All trees in turn, and the rows of the result."""
    trees = {"after": HERE.parent.parent}
    if ARGS.before:
        trees = {"before": ARGS.before.resolve(), **trees}
    taken: dict[tuple[str, int, str], list[float]] = {}
    programs: dict[str, int] = {}
    for turn in range(ARGS.rounds):
        for leaves in ARGS.leaves:
            for label in list(trees)[:: 1 if turn % 2 else -1]:
                found = in_process(trees[label], leaves, compiled=False)
                found |= in_process(trees[label], leaves, compiled=True)
                for name, cell in found.items():
                    taken.setdefault((name, leaves, label), []).extend(cell["seconds"])
                    programs.setdefault(name, cell.get("programs", 1))
                print(f"round {turn + 1}: {leaves} leaves, {label}", file=sys.stderr, flush=True)
    rows = [
        {
            "cell": name,
            "programs": programs[name],
            "leaves": leaves,
            "tree": label,
            "seconds": round(min(times), 6),
            "median_seconds": round(statistics.median(times), 6),
            "seconds_per_1000_leaves": round(1000 * min(times) / leaves, 6),
        }
        for (name, leaves, label), times in taken.items()
    ]
    return {
        "command": _command(),
        "commits": {label: commit_of(tree) for label, tree in trees.items()},
        "machine": describe(),
        "load": os.getloadavg(),
        "rows": rows,
    }


def markdown(result: dict[str, Any]) -> str:
    """The table: a row per cell, a column per number of leaves."""
    least = {(r["cell"], r["leaves"], r["tree"]): r["seconds"] for r in result["rows"]}
    programs = {r["cell"]: r["programs"] for r in result["rows"]}
    labels = list(result["commits"])
    machine = result["machine"]
    commits = ", ".join(f"{label}: {commit}" for label, commit in result["commits"].items())
    lines = [
        "# Tracing an update, and starting one",
        "",
        f"`{result['command']}`, {machine['processor']}, {machine['cores']} cores, Python "
        f"{machine['python']}, jax {machine['jax']}, {machine['devices']}; {commits}.",
        "",
        "Milliseconds of processor time of the calling thread, the least of "
        f"{ARGS.rounds} processes each. Leaves are (8, 8) float32. What is traced is one update "
        "under shard_map; of a host-scheduled transform all programs together. `nothing` is what "
        "every update costs, without a transform. Steps are those of `js.make_train_step` with "
        "plain SGD, all programs together; the compiler's time is that of all its threads. An "
        "exchange by hand averages in every step, in one buffer of which it takes slices.",
        "",
        "| | programs | " + " | ".join(f"{n} leaves" for n in ARGS.leaves) + " |",
        "|---|---:|" + "---:|" * len(ARGS.leaves),
    ]
    for name, count in programs.items():
        columns = []
        for leaves in ARGS.leaves:
            found = [least.get((name, leaves, label)) for label in labels]
            times = [1000 * t for t in found if t is not None]
            columns.append(" → ".join(f"{t:.0f}" if t >= 20 else f"{t:.2f}" for t in times))
        lines.append(f"| {name} | {count} | " + " | ".join(columns) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    if ARGS.measure:
        measure(ARGS.measure)
        return
    result = run()
    table = markdown(result)
    print(table)
    if ARGS.out:
        ARGS.out.parent.mkdir(parents=True, exist_ok=True)
        ARGS.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        ARGS.out.with_suffix(".md").write_text(table)


if __name__ == "__main__":
    main()
