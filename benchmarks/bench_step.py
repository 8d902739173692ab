"""What the transforms cost per step, as ratios to the same optimizer alone, in one run.

    python benchmarks/bench_step.py --out benchmarks/results/bench_step_cpu.json

Steps of all variants take turns, so that what else the machine does falls on all alike; each ratio
is the median over rounds of a variant's time over the optimizer-alone time of the same round.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import jax

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--replicas", type=int, default=4)
PARSER.add_argument("--width", type=int, default=768, help="of the MLP's 3 hidden layers")
PARSER.add_argument("--batch", type=int, default=64, help="examples per replica")
PARSER.add_argument("--rounds", type=int, default=60)
PARSER.add_argument("--virtual", action="store_true", help="all replicas on one device")
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


def main() -> None:
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
        sent[name] = [(r.count, r.collective, r.bytes) for r in rows if r.level == "emitted"]
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
