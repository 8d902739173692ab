"""Runs the study: every cell is tuned and trained, and written to results/ as it ends.

    python benchmarks/study/run.py                  # all cells that results/ lacks
    python benchmarks/study/run.py --check 3 --seed 7    # trains 3 recorded cells again, by chance
    python benchmarks/study/report.py               # the tables and pictures of docs/study.md

It can be stopped at any time: a second run goes on with the cells that are missing.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rows import PARTS, RESULTS, Cell, Row, by_cell, cell_of, path_of, recorded
from statistics_of import interval

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

PARSER = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
PARSER.add_argument("--part", choices=PARTS, help="only one part")
PARSER.add_argument("--only", default="", help="only cells whose key holds this text")
PARSER.add_argument("--workers", type=int, default=2, help="processes, each on a core of its own")
PARSER.add_argument("--check", type=int, help="train so many recorded cells again, and compare")
PARSER.add_argument("--seed", type=int, default=0, help="which cells --check takes")


def _start(cores: "Queue[int]") -> None:
    # One core per process: two programs that share both cores wait for each other at every product.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores.get()})


def _work(cell: Cell) -> Row:
    import machine

    import train

    return {**train.row_of(cell), "machine": machine.describe()}


def _again(row: Row) -> dict[str, Any]:
    import train

    data = train.TASKS[row["part"]]().data
    if data != row["data"]:  # such as the source of another Python
        return {"refused": f"recorded with {row['data']}, and here is {data}"}
    return train.final_of(cell_of(row), row["best"])


def _pool(workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    for number in range(workers):
        cores.put(available[number % len(available)])
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(cores,))


def run(args: argparse.Namespace) -> int:
    from cells import all_cells

    done = by_cell()
    cells = [c for c in all_cells() if args.part in (None, c.part) and args.only in c.key]
    missing = [cell for cell in cells if cell not in done]
    print(f"{len(cells) - len(missing)} of {len(cells)} cells are recorded", flush=True)
    RESULTS.mkdir(exist_ok=True)
    began = time.perf_counter()
    # The longest first, so that no process is left with a long one at the end.
    missing.sort(key=lambda cell: (cell.part != "language", -cell.replicas * cell.steps))
    with _pool(args.workers) as pool:
        for number, future in enumerate(as_completed([pool.submit(_work, c) for c in missing]), 1):
            row = future.result()
            with path_of(row["part"]).open("a") as file:
                file.write(json.dumps(row) + "\n")
            mean = sum(row["test"]) / len(row["test"])
            minutes = (time.perf_counter() - began) / 60
            print(
                f"{number}/{len(missing)} {minutes:5.1f} min  {cell_of(row).key}: {mean:.4f} "
                f"at {row['best']} ({row['seconds']} s)",
                flush=True,
            )
    return 0


def check(args: argparse.Namespace) -> int:
    """Train recorded cells again; their means must be within the recorded interval of 95 %."""
    parts = (args.part,) if args.part else PARTS
    every = [row for part in parts for row in recorded(part)]
    rows = [row for row in every if args.only in cell_of(row).key]
    if not 1 <= args.check <= len(rows):
        PARSER.error(f"--check must be between 1 and {len(rows)}, the rows, got {args.check}")
    chosen = random.Random(args.seed).sample(rows, args.check)
    with _pool(args.workers) as pool:
        results = list(pool.map(_again, chosen))
    failed = 0
    for row, result in zip(chosen, results, strict=True):
        if "refused" in result:
            print(f"{cell_of(row).key}: NOT COMPARED: {result['refused']}")
            failed += 1
            continue
        mean, half = interval(row["test"])
        again = interval(result["test"])[0]
        failed += not (is_within := abs(again - mean) <= half)
        print(
            f"{cell_of(row).key}: {again:.4f}, recorded {mean:.4f} +- {half:.4f}: "
            f"{'agrees' if is_within else 'DIFFERS'}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    arguments = PARSER.parse_args()
    if arguments.workers < 1:
        PARSER.error(f"--workers must be >= 1, got {arguments.workers}")
    sys.exit(run(arguments) if arguments.check is None else check(arguments))
