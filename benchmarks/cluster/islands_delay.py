"""Time in training of islands that wait for their exchanges, and of those that hide them.

    sudo .venv/bin/python benchmarks/cluster/islands_delay.py \
        --out benchmarks/results/cluster_islands_delay

Four islands and a store on five hosts, as in islands_kills.py: undisturbed without and with a
delay, one after the other, and then with the delay and kills.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import host_group  # noqa: F401 - it makes the next ones importable

sys.path.insert(0, str(Path(__file__).parents[1]))

from island_runs import BUCKET, digests, problems, replayed, run_islands, store
from islands_kills import BYTES, KILLED, NAMES, STEP_SECONDS, SYNC_EVERY, plans
from islands_time import shares
from machine import host
from namespaces import hosts, missing, set_rate

FORMS = ("waiting", "delay", "delay and kills")


def measure(form: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    env = {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs")}
    delay = 0 if form == "waiting" else args.delay
    options = [
        "--step-seconds", str(STEP_SECONDS), "--sync-every", str(SYNC_EVERY),
        "--deadline", str(args.deadline), "--delay", str(delay),
    ]  # fmt: skip
    load = os.getloadavg()[0]
    with hosts(5, "1gbit") as found:
        set_rate(found[:4], f"{args.mbit:g}mbit")
        with store(found[4]) as reach:
            ran = run_islands(
                folder / form.replace(" ", "-"), NAMES, BUCKET,
                plans(args.mbit, args) if "kills" in form else {},
                env=env | reach, hosts=found[:4], options=options,
                rounds=args.rounds, seconds=900,
            )  # fmt: skip
            ran.replay = replayed(BUCKET, env | reach, found[4])
    calm = [name for name in NAMES if "kills" not in form or name not in KILLED]
    all_shares = [shares(ran, name) for name in calm]
    return {
        "form": form, "delay": delay, "load": [load, os.getloadavg()[0]],
        "rounds": ran.replay["rounds"], "kills": len(ran.kills),
        "never killed": calm,
        "shares": {k: sum(x[k] for x in all_shares) / len(calm) for k in all_shares[0]},
        "anchors compared with the replay": len(digests(ran)),
        "problems": problems(ran),
    }  # fmt: skip


def markdown(facts: dict[str, Any]) -> str:
    machine = facts["machine"]
    lines = [
        "# Islands that exchange beside training\n",
        f"`sudo .venv/bin/python benchmarks/cluster/islands_delay.py --mbit {facts['mbit']:g}`, "
        f"{facts['date']}: {machine['processor']}, {machine['cores']} cores, Python "
        f"{machine['python']}, {facts['versions']}. The machine was shared with other work; the "
        "rows are one run, one after the other.\n",
        "Four islands of two replicas and a store (moto) on five hosts: network namespaces with "
        f"links of {facts['mbit']:g} Mbit/s, that of the store of 1 Gbit/s. A part has {BYTES:,} "
        f"bytes, an update takes {STEP_SECONDS * 1000:.0f} ms, an exchange follows every "
        f"{SYNC_EVERY} updates, a checkpoint each exchange; `deadline_seconds="
        f"{facts['deadline']:g}`. Shares are the mean of the islands that were not killed. "
        "Afterwards NumPy computes all anchors again from the bucket.\n",
        "| form | load before, after | rounds | kills | training | waiting | saving | "
        "updates per second | anchors compared | not as promised |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in facts["rows"]:
        share, form = row["shares"], row["form"]
        name = form if not row["delay"] else form.replace("delay", f"`delay={row['delay']}`")
        lines.append(
            f"| {name} | {row['load'][0]:.1f}, {row['load'][1]:.1f} | {row['rounds']} | "
            f"{row['kills']} | {share['training']:.1%} | {share['waiting']:.1%} | "
            f"{share['saving']:.1%} | {share['updates per second']:.2f} | "
            f"{row['anchors compared with the replay']} | "
            f"{'; '.join(row['problems']) or 'nothing'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=200.0, help="of the islands' links")
    parser.add_argument("--delay", type=int, default=40)
    parser.add_argument("--deadline", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=16, help="of the undisturbed runs")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--least-down", type=float, default=3.0, help="seconds")
    parser.add_argument("--most-down", type=float, default=6.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="path without suffix; .json and .md are added")
    args = parser.parse_args()
    if lacks := missing():
        parser.error(f"missing here: {', '.join(lacks)}.")
    facts: dict[str, Any] = {
        "machine": host(), "date": time.strftime("%Y-%m-%d"), "mbit": args.mbit,
        "deadline": args.deadline, "rows": [],
        "versions": ", ".join(f"{name} {version(name)}" for name in ("jax", "obstore", "moto")),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for form in FORMS:
            facts["rows"].append(measure(form, args, Path(folder)))
            print(facts["rows"][-1], flush=True)
            if args.out:
                args.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
                args.out.with_suffix(".md").write_text(markdown(facts))
    print(markdown(facts))


if __name__ == "__main__":
    main()
