"""Milliseconds per step and bytes sent on shaped links, beside torch, in one run.

    make bench-env
    sudo .venv/bin/python benchmarks/cluster/step_time.py --out benchmarks/results/cluster_step_time

Four hosts on one machine: network namespaces whose links tbf shapes in both directions (root and
iproute2). Both libraries train the same MLP on the same batches, one process per host and one
arithmetic thread each. Their variants take turns, so that what else the machine does falls on all
alike. A step's time is that of the slowest host; processor time and bytes, headers included, are
means over the hosts.
"""

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import task
from host_group import ROOT, HostGroup, medians
from namespaces import Host, hosts, missing, set_rate
from step_time_table import markdown

TORCH_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
APART = "--xla_disable_hlo_passes=cpu-all-reduce-combiner"
TORCH_ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default=",".join(task.RATES), help="of the links, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="variants, with semicolons")
    parser.add_argument("--out", type=Path, help="path without suffix; .json and .md are added")
    args = parser.parse_args()
    if lacks := missing():
        parser.error(f"missing here: {', '.join(lacks)}.")
    if not TORCH_PYTHON.exists():
        parser.error(f"{TORCH_PYTHON} is missing; `make bench-env` installs torch there.")
    return args


def measure(found: list[Host], args: argparse.Namespace, cache: str) -> dict:
    wanted = [name for name in args.only.split(";") if name]
    jax_env = {
        "XLA_FLAGS": ONE_THREAD,
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    kinds = {
        "jax": (sys.executable, "jax_worker.py", 9811, jax_env),
        "jax apart": (
            sys.executable,
            "jax_worker.py",
            9812,
            jax_env | {"XLA_FLAGS": f"{ONE_THREAD} {APART}"},
        ),
        "torch": (str(TORCH_PYTHON), "torch_worker.py", 9813, TORCH_ENV),
    }
    groups: dict[str, HostGroup] = {}
    turns: list[tuple[str, str, int]] = []
    rows: dict[tuple[str, str], dict] = {}
    try:
        for kind, start in kinds.items():
            groups[kind] = HostGroup(found, *start)
        both = itertools.zip_longest(task.JAX.items(), task.TORCH.items())
        for pair in both:
            for library, item in zip(("jax", "torch"), pair, strict=True):
                if item is None or (wanted and item[0] not in wanted):
                    continue
                name, steps = item
                kind = "jax apart" if library == "jax" and "apart" in name else library
                facts = groups[kind].ask(name, seconds=300)[0]
                print(f"{library} {name}: {facts}", file=sys.stderr, flush=True)
                rows[library, name] = {"library": library, "variant": name, **facts, "rates": {}}
                if "refused" not in facts:
                    turns.append((kind, name, steps))
        for rate in args.rates.split(","):
            set_rate(found, rate)
            for turn in range(args.rounds):
                for kind, name, steps in turns:
                    answers = groups[kind].ask(name, steps, seconds=300)
                    variant = rows[kind.split()[0], name]
                    # A mean over hosts of their own batches; the first period came before.
                    variant["loss"] = sum(a["loss"] for a in answers) / len(answers)
                    variant["steps"] = variant.get("steps", steps) + steps
                    row = variant["rates"].setdefault(
                        rate, {"ms": [], "processor_ms": [], "bytes": []}
                    )
                    row["ms"].append(1000 * max(a["seconds"] for a in answers) / steps)
                    row["processor_ms"].append(
                        1000 * sum(a["processor"] for a in answers) / len(answers) / steps
                    )
                    row["bytes"].append(sum(a["bytes"] for a in answers) / len(answers) / steps)
                print(f"{rate}: round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
        facts = {kind: groups[kind].facts for kind in ("jax", "torch")}
    finally:
        for group in groups.values():
            group.close()
    return {"facts": facts, "rows": [summarise(row, rows) for row in rows.values()]}


def summarise(row: dict, rows: dict[tuple[str, str], dict]) -> dict:
    """Medians, and ratios as medians over rounds of both times of the same round."""

    def ratio(rate: str, other: tuple[str, str]) -> float | None:
        if other not in rows or rate not in rows[other]["rates"]:
            return None
        pairs = zip(row["rates"][rate]["ms"], rows[other]["rates"][rate]["ms"], strict=True)
        return round(medians([a / b for a, b in pairs])["median"], 3)

    return row | {
        "rates": {
            rate: {
                "ms": {k: round(v, 1) for k, v in medians(found["ms"]).items()},
                "processor_ms": round(medians(found["processor_ms"])["median"], 1),
                "bytes": round(medians(found["bytes"])["median"]),
                "ratio_to_ddp": ratio(rate, ("torch", "DDP")),
                "ratio_to_alone": ratio(rate, (row["library"], "no communication")),
            }
            for rate, found in row["rates"].items()
        }
    }


def main() -> None:
    args = parse()
    # A polite kill ends the run as Ctrl-C does: with the hosts removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begin, load = time.time(), os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as cache,
        hosts(task.HOSTS, args.rates.split(",")[0]) as found,
    ):
        measured = measure(found, args, cache)
    options = f"--rates {args.rates} --rounds {args.rounds}"
    options += f' --only "{args.only}"' if args.only else ""
    result = {
        "command": f"benchmarks/cluster/step_time.py {options}",
        "machine": measured["facts"]["jax"],
        "torch": measured["facts"]["torch"],
        "hosts": task.HOSTS,
        "model_bytes": task.num_bytes(),
        "batch": task.BATCH,
        "environment": {"jax": ONE_THREAD, "jax apart": APART, "torch": TORCH_ENV},
        "load_averages": [round(load, 1), round(os.getloadavg()[0], 1)],
        "minutes": round((time.time() - begin) / 60, 1),
        "rows": measured["rows"],
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
