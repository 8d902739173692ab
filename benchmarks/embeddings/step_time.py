"""Milliseconds per step of sharded embeddings on shaped links, by mode of the pipeline.

    sudo .venv/bin/python benchmarks/embeddings/step_time.py --out \\
        benchmarks/results/embedding_step_time

Four hosts on one machine: network namespaces whose links tbf shapes in both directions (root and
iproute2). A DLRM with 8 tables, whose rows the hosts share; one process per host and one arithmetic
thread each. The variants take turns, so that what else the machine does falls on all alike. A
step's time is that of the slowest host, bytes are the mean of what the hosts' interfaces send,
headers included. Least possible is the longer of two: computing alone on one host, and sending
alone, which is the bytes of the exact mode over the rate of the link.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "cluster"))

import workload
from host_group import HostGroup, medians
from namespaces import Host, hosts, missing, set_rate
from results_table import markdown

WORKER = str(Path(__file__).with_name("worker.py"))
ENV = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "OMP_NUM_THREADS": "1"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="100mbit,200mbit,1gbit", help="of the links")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", default=";".join(workload.STEPS), help="variants, with semicolons"
    )
    parser.add_argument("--out", type=Path, help="path without suffix; .json and .md are added")
    args = parser.parse_args()
    if lacks := missing():
        parser.error(f"missing here: {', '.join(lacks)}.")
    return args


def measure(found: list[Host], args: argparse.Namespace, cache: str) -> dict:
    env = ENV | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    group = HostGroup(found, sys.executable, WORKER, 9821, env)
    rows: dict[str, dict] = {}
    try:
        for name in args.only.split(";"):
            facts = group.ask(name, seconds=400)[0]
            print(f"{name}: {facts}", file=sys.stderr, flush=True)
            rows[name] = {**facts, "rates": {}}
        turns = [name for name, row in rows.items() if "refused" not in row]
        for rate in args.rates.split(","):
            set_rate(found, rate)
            for turn in range(args.rounds):
                for name in turns:
                    steps = workload.STEPS[name]
                    answers = group.ask(name, steps, seconds=300)
                    row = rows[name]["rates"].setdefault(rate, {"ms": [], "bytes": []})
                    row["ms"].append(1000 * max(a["seconds"] for a in answers) / steps)
                    row["bytes"].append(sum(a["bytes"] for a in answers) / len(answers) / steps)
                    rows[name]["last"] = answers[0]
                print(f"{rate}: round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
        return {"machine": group.facts, "rows": rows}
    finally:
        group.close()


def summarise(rows: dict[str, dict]) -> None:
    """Medians in place of rounds; ratios are medians over rounds of both times of a round."""
    rounds = {name: {r: x["ms"] for r, x in row["rates"].items()} for name, row in rows.items()}
    for row in rows.values():
        for rate, found in row["rates"].items():
            base = rounds.get("unpipelined", {}).get(rate)
            pairs = zip(found["ms"], base, strict=True) if base else ()
            ratios = [a / b for a, b in pairs]
            found["ratio"] = round(medians(ratios)["median"], 3) if ratios else None
            found["ms"] = {k: round(v, 1) for k, v in medians(found["ms"]).items()}
            found["bytes"] = round(medians(found["bytes"])["median"])


def main() -> None:
    args = parse()
    # A polite kill ends the run as Ctrl-C does: with the hosts removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begin, load = time.time(), os.getloadavg()[0]
    rates = args.rates.split(",")
    with tempfile.TemporaryDirectory() as cache, hosts(workload.HOSTS, rates[0]) as found:
        measured = measure(found, args, cache)
    summarise(measured["rows"])
    result = {
        "command": f"benchmarks/embeddings/step_time.py --rates {args.rates} "
        f"--rounds {args.rounds}",
        "machine": measured["machine"],
        "rates": rates,
        "dense_parameters": workload.num_dense_parameters(),
        "needed_bytes": workload.needed_bytes(),
        "load_averages": [round(load, 1), round(os.getloadavg()[0], 1)],
        "minutes": round((time.time() - begin) / 60, 1),
        "rows": measured["rows"],
    }
    text = markdown(result)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
