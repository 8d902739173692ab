"""What training steps compute, compile and send: a table that a rewrite must reproduce.

    python tools/step_table.py --out table.json              of this checkout
    python tools/step_table.py --before /path/of/checkout    and another's; 1 where a cell differs
    python tools/step_table.py --before table.json           the same with a table made earlier
    python tools/step_table.py --only "host, *, ahead*"      the cells of a pattern
    python tools/step_table.py --only "*, weights" --print   and what they hold

A cell is a mode, an algorithm and a use of the step (`tools/differential/step_cells.py`). It holds
digests of parameters, states, metrics and keys after each of five updates, how many programs each
update compiled (in a second run from a new state, too, where there should be none), and the
collectives of the programs as traced and as compiled. What the step refuses is there as an error.
"""

import argparse
import fnmatch
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from differential.checkouts import ROOT, run_in

Table = dict[str, dict[str, Any]]


def filled(pattern: str, part: int, parts: int) -> Table:
    """Every `parts`-th of the cells of the checkout that is on the path."""
    import warnings

    import jax
    from differential.step_cells import CELLS
    from differential.step_cells import filled as fill

    warnings.simplefilter("ignore")
    table, group = {}, []
    names = [name for name in CELLS if fnmatch.fnmatch(name, pattern)]
    for name in names[part::parts]:
        if name.split(", ")[:2] != group:  # the programs of another mode and algorithm go
            group = name.split(", ")[:2]
            jax.clear_caches()
        print(name, file=sys.stderr, flush=True)  # the last line before a crash
        table[name] = fill(name)
    return table


def table_of(checkout: Path, pattern: str, jobs: int) -> Table:
    """The table of a checkout, in `jobs` processes; or that of a file."""
    if checkout.is_file():
        stored = json.loads(checkout.read_text())
        return {name: cell for name, cell in stored.items() if fnmatch.fnmatch(name, pattern)}

    def run(part: int) -> Table:
        arguments = ["--only", pattern, "--part", str(part), "--jobs", str(jobs)]
        return json.loads(run_in(checkout, "step_table.py", *arguments).splitlines()[-1])

    with ThreadPoolExecutor(jobs) as pool:
        parts = list(pool.map(run, range(jobs)))
    return {name: cell for part in parts for name, cell in part.items()}


def differing(before: Table, now: Table) -> list[str]:
    """A line for each field of a cell that is not the same."""
    lines = []
    for name in {**before, **now}:
        one, other = before.get(name, {}), now.get(name, {})
        for field in {**one, **other}:
            old, new = one.get(field, "nothing"), other.get(field, "nothing")
            if old == new:
                continue
            if isinstance(old, list) and isinstance(new, list) and {*old} != {*new}:
                old, new = ([x for x in a if x not in b] for a, b in ((old, new), (new, old)))
            lines.append(f"{name}: {field}: {old} -> {new}")
    return lines


def main() -> None:
    """Make the table, write it, compare it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the table of this checkout")
    parser.add_argument("--before", type=Path, help="another checkout, or the file of its table")
    parser.add_argument("--only", default="*", help='pattern of cells, "mode, algorithm, use"')
    parser.add_argument("--jobs", type=int, default=2, help="processes; 2 by default")
    parser.add_argument("--print", action="store_true", help="print the table of this checkout")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        print(json.dumps(filled(arguments.only, arguments.part, arguments.jobs)))
        return
    start = time.monotonic()
    now = table_of(ROOT, arguments.only, arguments.jobs)
    refused = sum("error" in cell for cell in now.values())
    seconds = time.monotonic() - start
    print(f"{len(now)} cells, {refused} refused, {seconds:.0f} s")
    if arguments.out:
        arguments.out.write_text(json.dumps(now, indent=1))
    if arguments.print:
        print(json.dumps(now, indent=1))
    if arguments.before:
        lines = differing(table_of(arguments.before, arguments.only, arguments.jobs), now)
        print("\n".join([*lines, f"{len(lines)} fields differ"]))
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
