"""Islands on hosts of which two are killed twenty times; beside it the same kills under one group.

    sudo .venv/bin/python benchmarks/cluster/islands_kills.py --mbit 20,200 \
        --out benchmarks/results/cluster_islands

Four islands and a store (moto) on five hosts of one machine: network namespaces whose links tbf
shapes in both directions (root and iproute2). The link of the store has 1 Gbit/s. Each rate is run
four times: islands undisturbed, islands with kills, one group (js.diloco over the same hosts, with
the rules of `jaxslowmo launch --restarts`) undisturbed, and the group with outages of the same
hosts at the same times.
"""

import argparse
import dataclasses
import json
import os
import random
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import host_group  # noqa: F401 - it makes the next ones importable

sys.path.insert(0, str(Path(__file__).parents[1]))

from island_runs import (
    BUCKET,
    Moment,
    digests,
    problems,
    replayed,
    run_islands,
    store,
)
from islands_time import longest_wait, run_group, shares
from machine import host
from namespaces import hosts, missing, set_rate

NAMES, KILLED = ("a", "b", "c", "d"), ("c", "d")
BYTES = 442_368  # a part; a snapshot has twice as much
STEP_SECONDS, SYNC_EVERY, DEADLINE = 0.05, 100, 0.5


def moments(mbit: float) -> list[Moment]:
    """Twenty; first those of an island in step with the others, as before its first kill."""
    # tbf lets a burst of 256 KiB pass at once.
    upload = 8 * (BYTES - 2**18) / (mbit * 1e6)
    period = STEP_SECONDS * SYNC_EVERY
    return [
        Moment("before its manifest", "manifest begins"),
        Moment("while a snapshot is written", "snapshot begins", upload),
        Moment("after its manifest", "manifest ends"),
        *[Moment("between exchanges", "trains", period)] * 5,
        *[Moment("while a part is sent", "part begins", upload)] * 5,
        *[Moment("after a part was sent", "part ends", 0.03)] * 3,
        *[Moment("while parts are read", "reading begins", upload)] * 2,
        *[Moment("while a checkpoint is written", "checkpoint begins", 0.03)] * 2,
    ]


def plans(mbit: float, args: argparse.Namespace) -> dict[str, list[tuple[Moment, float]]]:
    """Which island is killed when, and for how long it is away."""
    rng = random.Random(args.seed)
    first, others = moments(mbit)[:3], moments(mbit)[3:]
    rng.shuffle(others)
    pairs = [
        (moment, rng.uniform(args.least_down, args.most_down))
        for moment in [*first, *others][: args.kills]
    ]
    return {name: pairs[i :: len(KILLED)] for i, name in enumerate(KILLED)}


def measure(mbit: float, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    env = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs")}
    options = [
        "--step-seconds", str(STEP_SECONDS), "--sync-every", str(SYNC_EVERY),
        "--deadline", str(DEADLINE),
    ]  # fmt: skip
    facts: dict[str, Any] = {"mbit": mbit, "load": [os.getloadavg()[0]]}
    with hosts(5, "1gbit") as found:
        set_rate(found[:4], f"{mbit:g}mbit")
        for kind in ("undisturbed", "kills"):
            with store(found[4]) as reach:
                ran = run_islands(
                    folder / f"islands-{kind}", NAMES, BUCKET,
                    plans(mbit, args) if kind == "kills" else {},
                    env=env | reach, hosts=found[:4], options=options,
                    rounds=args.rounds, seconds=1500,
                )  # fmt: skip
                ran.replay = replayed(BUCKET, env | reach, found[4])
            told = digests(ran)
            facts[f"islands {kind}"] = {
                "seconds": round(ran.seconds, 1),
                "rounds": ran.replay["rounds"],
                "islands per round": round(
                    sum(map(len, ran.replay["islands"])) / ran.replay["rounds"], 2
                ),
                "parts in no round": len(ran.replay["left"]),
                "snapshots": len(ran.replay["snapshots"]),
                "anchors compared with the replay": len(told),
                "last anchor": {n: ran.facts[n] and told[n, ran.replay["rounds"]] for n in NAMES},
                "last anchor of the replay": ran.replay["digests"][-1],
                "longest exchange (s)": round(longest_wait(ran), 2),
                "never killed": {
                    name: {k: round(v, 4) for k, v in shares(ran, name).items()}
                    for name in NAMES
                    if name not in KILLED
                },
                "kills": [dataclasses.asdict(kill) for kill in ran.kills],
                "problems": problems(ran),
            }
            print(f"{mbit:g} Mbit/s, islands, {kind}: {facts[f'islands {kind}']}", flush=True)
        kills = facts["islands kills"]
        outages = [(k["seconds"], NAMES.index(k["island"]), k["down"]) for k in kills["kills"]]
        calm = facts["islands undisturbed"]["seconds"]
        for kind, seconds in (("undisturbed", min(80, calm)), ("kills", kills["seconds"])):
            facts[f"group {kind}"] = run_group(
                folder / f"group-{kind}", found[:4], outages if kind == "kills" else (), seconds,
                env=env, options=options,
            )  # fmt: skip
            print(f"{mbit:g} Mbit/s, group, {kind}: {facts[f'group {kind}']}", flush=True)
    facts["load"].append(os.getloadavg()[0])
    return facts


def phases(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Kill each of three islands once at the moments of the island that decides a round."""
    rows = []
    options = ["--step-seconds", "0.02", "--sync-every", "50", "--deadline", "1"]
    env = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs")}
    with hosts(4, "200mbit") as found:
        for moment in moments(200)[:3]:
            with store(found[3]) as reach:
                ran = run_islands(
                    folder / moment.mark.replace(" ", "-"), NAMES[:3], BUCKET,
                    {name: [(moment, args.least_down)] for name in NAMES[:3]},
                    env=env | reach, hosts=found[:3], options=options, seconds=300,
                )  # fmt: skip
                ran.replay = replayed(BUCKET, env | reach, found[3])
            kills = [dataclasses.asdict(kill) for kill in ran.kills]
            rows.append({"kills": kills, "rounds": ran.replay["rounds"], "problems": problems(ran)})
            print(f"phases: {rows[-1]}", flush=True)
    return rows


def _mean(ran: dict[str, Any], kind: str) -> float:
    values = [facts[kind] for facts in ran["never killed"].values()]
    return sum(values) / len(values)


def _pair(what: str, calm: float, kills: float, form: str) -> str:
    return f"| {what} | {calm:{form}} | {kills:{form}} | {kills / calm:.1%} |"


def _section(one: dict[str, Any]) -> list[str]:
    calm, kills = one["islands undisturbed"], one["islands kills"]
    group = [one[f"group {kind}"] for kind in ("undisturbed", "kills")]
    rates = [x["updates"] / x["seconds"] for x in group]
    names = " and ".join(kills["never killed"])
    lines = [
        f"\n## {one['mbit']:g} Mbit/s, {len(kills['kills'])} kills\n",
        "| | undisturbed | with kills | with kills / undisturbed |",
        "|---|---:|---:|---:|",
        *(
            _pair(f"{names}: time in {kind}", _mean(calm, kind), _mean(kills, kind), ".1%")
            for kind in ("training", "waiting", "saving")
        ),
        _pair(
            f"{names}: updates per second",
            _mean(calm, "updates per second"), _mean(kills, "updates per second"), ".2f",
        ),
        _pair("one group: updates per second", *rates, ".2f"),
        "",
        f"With kills: {kills['rounds']} rounds in {kills['seconds']:.0f} s, of "
        f"{kills['islands per round']} islands on average; {kills['parts in no round']} parts are "
        f"in no round. The longest exchange of any island took {kills['longest exchange (s)']} s. "
        f"{kills['anchors compared with the replay']} anchors of islands were compared with the "
        f"replay. Not as promised: {'; '.join(kills['problems']) or 'nothing'}. Last anchors of "
        f"islands: {', '.join(sorted({x[:16] for x in kills['last anchor'].values()}))}; of the "
        f"replay: {kills['last anchor of the replay'][:16]}.",
        "",
        f"The group was started {group[1]['starts']} times in {group[1]['seconds']:.0f} s; "
        f"{group[1]['hits']} outages met a process that ran, the others a host without one.",
        "",
        "| second | island | killed | its last mark | away (s) |",
        "|---:|---|---|---|---:|",
    ]  # fmt: skip
    for kill in kills["kills"]:
        cells = kill["seconds"], kill["island"], kill["moment"], kill["after"], kill["down"]
        lines.append("| {:.0f} | {} | {} | {} | {:.0f} |".format(*cells))
    return lines


def markdown(facts: dict[str, Any]) -> str:
    rates = ",".join(f"{one['mbit']:g}" for one in facts["rates"])
    machine = facts["machine"]
    loads = "; ".join(" and ".join(f"{x:.1f}" for x in one["load"]) for one in facts["rates"])
    least, most = facts["down"]
    paragraphs = [
        "# Islands that are killed",
        f"`sudo .venv/bin/python benchmarks/cluster/islands_kills.py --mbit {rates}`, "
        f"{facts['date']}: {machine['processor']}, {machine['cores']} cores, Python "
        f"{machine['python']}, {facts['versions']}. Load averages (1 minute) before and after: "
        f"{loads}.",
        "Four islands of two replicas and a store (moto) on five hosts: network namespaces with "
        f"shaped links, that of the store of 1 Gbit/s. A part has {BYTES:,} bytes. An update takes "
        f"{STEP_SECONDS * 1000:.0f} ms, most of which a process sleeps, as if on an accelerator. "
        f"An exchange after every {SYNC_EVERY} updates, `quorum=1`, "
        f'`deadline_seconds={DEADLINE}`, `late="carry"`, a snapshot every 2 rounds, a checkpoint '
        "after each exchange. Two islands are killed by SIGKILL, at moments that their own marks "
        f"announce, and start again {least:g} to {most:g} s later. (not met): the moment did not "
        "come within 40 s, and the island was killed at once.",
        "At the end NumPy computes all anchors again from the bucket (`tests/support/replay.py`, "
        "which imports nothing of jaxslowmo). Beside it one group: `js.diloco` over the same "
        "hosts, model and updates, started again by the rules of `jaxslowmo launch --restarts`. "
        "The hosts "
        "are away at the same seconds, each for as long. Updates that it had to repeat are "
        "counted once.",
        "Time in training is that of the islands that were never killed, a and b. An island that "
        "is away costs the others up to `deadline_seconds` when it goes and when it comes, and "
        "saves them the reading of its parts; so the share may be above 100%.",
        *facts.get("notes", ()),
    ]
    lines = [line for one in facts["rates"] for line in _section(one)]
    lines += [
        "\n## Each of three islands, killed at the moments of the one that decides a round\n",
        "200 Mbit/s, rounds of 1 s; every row is a run of its own.\n",
        "| killed | last marks | rounds | not as promised |",
        "|---|---|---:|---|",
    ]
    for row in facts["phases"]:
        marks = ", ".join(f"{kill['island']}: {kill['after']}" for kill in row["kills"])
        wrong = "; ".join(row["problems"]) or "nothing"
        lines.append(f"| {row['kills'][0]['moment']} | {marks} | {row['rounds']} | {wrong} |")
    return "\n\n".join(paragraphs) + "\n" + "\n".join(lines) + "\n"


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", default="20,200", help="of the islands' links, with commas")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=24, help="of the undisturbed run")
    parser.add_argument("--least-down", type=float, default=5.0, help="seconds")
    parser.add_argument("--most-down", type=float, default=20.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="path without suffix; .json and .md are added")
    args = parser.parse_args()
    if lacks := missing():
        parser.error(f"missing here: {', '.join(lacks)}.")
    facts: dict[str, Any] = {
        "machine": host(),
        "versions": ", ".join(f"{name} {version(name)}" for name in ("jax", "obstore", "moto")),
        "date": time.strftime("%Y-%m-%d"),
        "down": [args.least_down, args.most_down],
        "rates": [],
        "phases": [],
    }

    def write() -> None:
        if args.out:
            args.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
            args.out.with_suffix(".md").write_text(markdown(facts))

    with tempfile.TemporaryDirectory() as folder:
        for text in args.mbit.split(","):
            facts["rates"].append(measure(float(text), args, Path(folder) / text))
            write()
        facts["phases"] = phases(args, Path(folder) / "phases")
    write()
    print(markdown(facts))


if __name__ == "__main__":
    main()
