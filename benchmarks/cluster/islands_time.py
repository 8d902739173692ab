"""Shows what islands did with their time, and the same training as one group.

`island_runs.py` of tests/cluster runs the islands.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import host_group  # noqa: F401 - it makes the next ones importable
from island_runs import PROGRAM, Ran, Worker, environment
from namespaces import Host

HEARTBEAT, GRACE = 10, 10  # seconds, as `jaxslowmo launch` has them


def shares(ran: Ran, name: str) -> dict[str, float]:
    """Return what an island that was never killed did with its time since its first update."""
    last = [fact for fact in ran.facts[name] if "training" in fact][-1]
    begun = next(f["t"] for f in ran.facts[name] if f.get("mark") == "trains")
    wall = last["t"] - begun
    spent = {kind: last[kind] / wall for kind in ("training", "waiting", "saving")}
    return {**spent, "updates per second": last["step"] / wall}


def longest_wait(ran: Ran) -> float:
    """Seconds of the longest exchange of all islands."""
    longest = 0.0
    for facts in ran.facts.values():
        begun = None
        for fact in facts:
            if fact.get("mark") == "exchange begins":
                begun = fact
            elif fact.get("mark") == "checkpoint begins" and begun is not None:
                if begun["life"] == fact["life"]:
                    longest = max(longest, fact["t"] - begun["t"])
                begun = None
    return longest


def run_group(
    folder: Path,
    hosts: Sequence[Host],
    outages: Sequence[tuple[float, int, float]],
    seconds: float,
    *,
    env: Mapping[str, str],
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """Train one group over hosts with js.diloco, started again as by `launch --restarts`.

    Its rules: after the first failure the others may notice it and end, and are killed after
    the heartbeat's time and 10 s more; the next start is 1 s later, twice that for each further
    failure before there is a newer checkpoint. A host that is away must be back, too.

    Args:
      outages: seconds since the first update, host, seconds for which it is away.
      seconds: the time from the first update to the end.
    """
    folder.mkdir(parents=True)
    saved, workers = folder / "checkpoints", []
    for rank, host in enumerate(hosts):
        own = ["--name", str(rank), "--folder", str(saved), "--until", str(folder / "last")]
        command = [*host.command, sys.executable, str(PROGRAM), "group", *own, *options]
        workers.append(Worker(str(rank), command, environment(**env), folder / str(rank)))
    waiting, away = sorted(outages), [0.0] * len(hosts)
    hits, starts, pause, newest = 0, 0, 1.0, -1

    def left() -> float:
        first = next((f["t"] for f in workers[0].facts if f.get("mark") == "trains"), None)
        return seconds if first is None else first + seconds - time.time()

    def strike() -> None:
        nonlocal hits
        while waiting and seconds - left() >= max(waiting[0][0], 0.01):
            _, rank, down = waiting.pop(0)
            away[rank] = max(away[rank], time.time() + down)
            hits += workers[rank].kill()
        time.sleep(0.02)

    try:
        while left() > 0:
            starts += 1
            for worker in workers:
                worker.start("--url", f"{hosts[0].address}:{20000 + starts}")
            failed: float | None = None
            while left() > 0 and any(worker.is_running() for worker in workers):
                strike()
                if failed is None and any(w.process.poll() for w in workers if w.process):
                    failed = time.monotonic()
                if failed is not None and time.monotonic() - failed > HEARTBEAT + GRACE:
                    for worker in workers:
                        worker.kill()
            steps = [int(x.name) for x in saved.glob("*") if x.name.isdigit()]
            if max(steps, default=-1) > newest:
                newest, pause = max(steps), 1.0
            ready, pause = time.time() + pause, min(2 * pause, 60.0)
            while left() > 0 and time.time() < max(ready, *away):
                strike()
    finally:
        for worker in workers:
            worker.kill()
    told = [fact for fact in workers[0].facts if "training" in fact]
    done = max([fact["step"] for fact in told], default=0)
    return {"seconds": seconds, "updates": done, "starts": starts, "hits": hits}
