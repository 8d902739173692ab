"""Failures that are not deaths, tried on real processes: what is promised, and what was observed.

    python tests/cluster/failures.py --times 5
    python tests/cluster/failures.py --only SIGTERM

Prints a table, and ends with 1 where anything was not as promised. Observed are the longest time
to the end, from the fault or the last start, and the codes. Whatever the fault: no process is left.
Needs Linux and root, which mounts the disks that are full.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from faults import table as table
from faults.registry import FAULTS, attempt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--only", default="", help="a part of the names")
    given, broken = parser.parse_args(), 0
    print("| fault | promise | observed |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in [name for name in FAULTS if given.only in name]:
            tries = []
            for seed in range(given.times):
                place = Path(tempfile.mkdtemp(dir=folder)) / "try"
                tries.append(attempt(name, place, Path(folder) / "programs", seed))
            wrong = [one.broken for one in tries if one.broken is not None]
            print(*wrong, sep="\n\n", file=sys.stderr, flush=True)
            longest = max(one.seconds or 0.0 for one in tries)
            codes = sorted({code for one in tries for code in one.codes})
            kept = f"{len(tries) - len(wrong)} of {len(tries)}; ended within {longest:.1f} s"
            print(f"| {name} | {FAULTS[name].promise} | {kept}; code {codes} |", flush=True)
            broken += len(wrong)
    sys.exit(broken > 0)


if __name__ == "__main__":
    main()
