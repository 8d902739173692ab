"""What the transforms cost per step, as ratios to the same optimizer alone, in one run.

    python benchmarks/bench_step.py --out benchmarks/results/bench_step_cpu.json

Steps of all variants take turns, so that what else the machine does falls on all alike; each ratio
is the median over rounds of a variant's time over the optimizer-alone time of the same round.

    python benchmarks/bench_step.py --host-time

A model of 544 parameters on 2 virtual replicas, whose time is the host's: a step, `js.train_loop`
and `step.scan` beside a jitted loop, or a `lax.scan`, of the same model without this library.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--replicas", type=int, default=4)
PARSER.add_argument("--width", type=int, default=768, help="of the MLP's 3 hidden layers")
PARSER.add_argument("--batch", type=int, default=64, help="examples per replica")
PARSER.add_argument("--rounds", type=int, default=60)
PARSER.add_argument("--virtual", action="store_true", help="all replicas on one device")
PARSER.add_argument("--host-time", action="store_true", help="the host's time of a small step")
PARSER.add_argument("--only", nargs="+", help="beside the first, steps that contain one of these")
PARSER.add_argument("--out", type=Path)
ARGS = PARSER.parse_args()
if len(jax.config.jax_platforms or "") == 0 or jax.config.jax_platforms == "cpu":
    jax.config.update("jax_num_cpu_devices", ARGS.replicas)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from machine import describe  # noqa: E402

import jaxslowmo as js  # noqa: E402

NEVER = 10**9
PER_CALL = 48


def init_mlp(width: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 5)
    sizes = [(64, width), (width, width), (width, width), (width, width), (width, 16)]
    return {
        f"w{i}": jax.random.normal(key, size) / size[0] ** 0.5
        for i, (key, size) in enumerate(zip(keys, sizes, strict=True))
    }


def loss(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, y = batch
    for name in sorted(params)[:-1]:
        x = jax.nn.relu(x @ params[name])
    return jnp.mean((x @ params[sorted(params)[-1]] - y) ** 2)


def variants() -> dict[str, dict]:
    """Arguments of the step, by name; a period of 1 makes every step one of that kind."""

    def local_sgd(k: int) -> js.ParameterTransform:
        return js.local_sgd("replica", sync_every=k)

    def slowmo(k: int, base: int, **options) -> js.ParameterTransform:
        return js.slowmo("replica", base=local_sgd(base), sync_every=k, **options)

    local = {
        "local_sgd": local_sgd(NEVER),
        "slowmo": slowmo(NEVER, NEVER),
        "diloco": js.diloco("replica", sync_every=NEVER),
    }
    found: dict[str, dict] = {"optimizer alone": {"sync": "none"}}
    for name, sync in local.items():
        for mode in ("traced", "host"):
            found[f"{name}: local step, {mode}"] = {"sync": sync, "mode": mode}
    found["all_reduce: every step"] = {"gradients": js.all_reduce_gradients("replica")}
    due = {
        "local_sgd: average": local_sgd(1),
        "slowmo: slow step, sharded": slowmo(1, 1),
        "slowmo: slow step, unsharded": slowmo(1, 1, shard_state=False),
        "slowmo: average + slow step, base left": slowmo(1, 1, exact_average=False),
        "diloco: outer step": js.diloco("replica", sync_every=1),
    }
    found["sgp: one peer, traced"] = {"sync": js.sgp("replica")}
    due |= {
        "sgp: one peer, host": js.sgp("replica"),
        "sgp: one peer, overlap=1, host": js.sgp("replica", overlap=1),
        "slowmo over sgp: slow step, sharded": js.slowmo(
            "replica", base=js.sgp("replica"), sync_every=1
        ),
    }
    found |= {name: {"sync": sync, "mode": "host"} for name, sync in due.items()}
    wanted = ("optimizer alone", *(ARGS.only or found))
    return {name: parts for name, parts in found.items() if any(w in name for w in wanted)}


def host_time() -> dict[str, float]:
    """Return microseconds per update, the least of the rounds, by name of the loop."""
    rng = np.random.default_rng(0)
    params = {name: np.float32(rng.normal(size=(16, 16)) / 4) for name in ("in", "out")}
    params |= {name: np.zeros(16, np.float32) for name in ("bias", "last")}
    optimizer, mesh = optax.sgd(0.1), js.virtual_mesh({"replica": 2})
    batch = jnp.asarray(np.float32(rng.normal(size=(8, 16))))

    def small_loss(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ p["in"] + p["bias"]) @ p["out"] + p["last"] - x) ** 2)

    @jax.vmap
    def update(carry: tuple, x: jax.Array) -> tuple:
        value, grads = jax.value_and_grad(small_loss)(carry[0], x)
        updates, state = optimizer.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), value

    def plain(fn: Callable, x: jax.Array, per_call: int) -> Callable[[int], None]:
        both = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), params)
        held = [(both, jax.vmap(optimizer.init)(both))]
        fn = jax.jit(fn)

        def run(count: int) -> None:
            for _ in range(count // per_call):
                held[0], value = fn(held[0], x)
            jax.block_until_ready(value)

        return run

    def new_step(mode: str) -> tuple[js.train.TrainStep, list]:
        sync = js.local_sgd("replica", sync_every=PER_CALL)
        step = js.make_train_step(small_loss, optimizer, sync=sync, mesh=mesh, mode=mode)
        return step, [step.init(params)]

    def ours(name: str, x: jax.Array, per_call: int, mode: str) -> Callable[[int], None]:
        step, held = new_step(mode)

        def run(count: int) -> None:
            for _ in range(count // per_call):
                held[0], metrics = getattr(step, name)(held[0], x)
            jax.block_until_ready(metrics)

        return run

    def loop(**options: int) -> Callable[[int], None]:
        step, held = new_step("traced")

        def run(count: int) -> None:
            until = js.train.update_count(held[0]) + count
            batches = itertools.repeat(batch)
            for result in js.train_loop(step, held[0], batches, num_steps=until, **options):
                held[0] = result.state
            jax.block_until_ready(result.metrics)

        return run

    split = batch.reshape(2, 4, 16)
    many, many_split = (jnp.stack([x] * PER_CALL) for x in (batch, split))
    runs = {
        "plain": plain(update, split, 1),
        "plain scan": plain(lambda c, x: jax.lax.scan(update, c, x), many_split, PER_CALL),
        "step": ours("__call__", batch, 1, "traced"),
        "step, host": ours("__call__", batch, 1, "host"),
        "train_loop": loop(),
        "scan": ours("scan", many, PER_CALL, "traced"),
        "scan, host": ours("scan", many, PER_CALL, "host"),
        "train_loop, scan": loop(steps_per_call=PER_CALL),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    count = 10 * PER_CALL
    for run in runs.values():
        run(2 * PER_CALL)
    for _ in range(ARGS.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run(count)
            times[name].append((time.perf_counter() - start) / count * 1e6)
    return {name: min(taken) for name, taken in times.items()}


def print_host_time() -> None:
    found = host_time()
    for name, taken in found.items():
        base = "plain scan" if "scan" in name else "plain"
        print(f"{name:20} {taken:7.1f} us per update  x{taken / found[base]:.2f} of {base}")


def main() -> None:
    if ARGS.host_time:
        print_host_time()
        return
    axes = {"replica": ARGS.replicas}
    where: jax.NamedSharding | None = None
    if ARGS.virtual:
        mesh = js.virtual_mesh(axes)
    else:
        mesh = js.make_mesh(axes)
        where = jax.NamedSharding(mesh, jax.P("replica"))
    params = init_mlp(ARGS.width)
    rng = np.random.default_rng(0)
    batch = tuple(
        rng.normal(size=(ARGS.replicas * ARGS.batch, n)).astype(np.float32) for n in (64, 16)
    )
    batch = jax.device_put(batch, where)
    steps, states, times, sent = {}, {}, {}, {}
    for name, parts in variants().items():
        step = js.make_train_step(loss, optax.adamw(1e-3), mesh=mesh, **parts)
        states[name], steps[name], times[name] = step.init(params), step, []
        report = js.comm_report(step, states[name], batch)
        kind = next(k for k in report.kinds if k != "local" or len(report.kinds) == 1)
        kind = "local" if "local step" in name and "local" in report.kinds else kind
        rows = report.select(axis="replica", kind=kind) if "replica" in report.axes else ()
        sent[name] = [
            (r.count, r.collective, r.bytes) for r in rows if r.level == "emitted" and r.count
        ]
        for _ in range(3):
            states[name], _ = jax.block_until_ready(step(states[name], batch))
    for _ in range(ARGS.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            states[name], _ = jax.block_until_ready(step(states[name], batch))
            times[name].append(time.perf_counter() - start)
    alone = times["optimizer alone"]
    rows = []
    for name, taken in times.items():
        ratios = [t / a for t, a in zip(taken, alone, strict=True)]
        rows.append(
            {
                "step": name,
                "milliseconds": round(1000 * statistics.median(taken), 3),
                "ratio": round(statistics.median(ratios), 3),
                "collectives": [f"{n} {what} of {size:,} bytes" for n, what, size in sent[name]],
            }
        )
    result = {
        "command": "python benchmarks/bench_step.py",
        "arguments": {k: str(v) for k, v in vars(ARGS).items() if k != "out"},
        "parameter_bytes": sum(p.nbytes for p in params.values()),
        "machine": describe(),
        "rows": rows,
    }
    for row in rows:
        sends = ", ".join(row["collectives"]) or "nothing"
        print(f"{row['step']:40} {row['milliseconds']:9.2f} ms  x{row['ratio']:<6} {sends}")
    if ARGS.out:
        ARGS.out.parent.mkdir(parents=True, exist_ok=True)
        ARGS.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
