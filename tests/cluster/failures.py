"""Failures that are not deaths, tried on real processes: what is promised, and what was observed.

    python tests/cluster/failures.py --times 5
    python tests/cluster/failures.py --only SIGTERM

Prints a table, and ends with 1 where anything was not as promised. Observed are the longest time
to the end, from the fault or the last start, the codes, and the longest silence: time in which all
trainers waited. Whatever the fault: that is less than 30 s, and no process is left. Needs Linux and
root, which mounts the disks that are full.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from faults import alike, disks, exceptions, hangs, kills
from faults.registry import FAULTS, Fault, Observed, attempt

# Each puts its faults into the table.
FAMILIES = (disks, hangs, exceptions, alike, kills)


def row(one: Fault, tries: Sequence[Observed]) -> str:
    """The line of the table."""
    kept = sum(observed.broken is None for observed in tries)
    facts = [f"{kept} of {len(tries)}"]
    seconds = [observed.seconds for observed in tries if observed.seconds is not None]
    if seconds:
        facts.append(f"ended within {max(seconds):.1f} s")
    codes = sorted({code for observed in tries for code in observed.codes})
    if codes:
        facts.append(f"code {', '.join(map(str, codes))}")
    facts.append(f"silence {max(observed.silence for observed in tries):.0f} s")
    return f"| {one.name} | {one.promise} | {'; '.join(facts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wanted = [one for name, one in FAULTS.items() if given.only in name]
    broken, begin = 0, time.monotonic()
    print("| fault | promise | observed |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, one in enumerate(wanted):
            tries = []
            for i in range(given.times):
                place = Path(folder) / f"{number}.{i}"
                observed = attempt(one, place, Path(folder) / "programs", given.seed + i)
                if observed.broken is not None:
                    broken += 1
                    print(f"{one.name}: {observed.broken}\n", file=sys.stderr, flush=True)
                tries.append(observed)
            print(row(one, tries), flush=True)
    minutes = (time.monotonic() - begin) / 60
    print(f"\n{len(wanted)} faults, {given.times} times each, in {minutes:.0f} minutes.")
    sys.exit(broken > 0)


if __name__ == "__main__":
    main()
