"""Trains four rows of the study again, in a minute: where slow momentum pays.

    make demo

32 virtual replicas of a perceptron learn handwritten digits, from 10 seeds, in one program per
algorithm: with an all-reduce of the gradients in every update, with averages of the
parameters every 48 updates, with slow momentum in place of these averages, and as DiLoCo does.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from pictures import SHOWN, draw_runs
from rich.console import Console
from rich.table import Table
from rows import ALL_REDUCE, DILOCO, LOCAL_SGD, PARAMETERS, SLOWMO, Cell, Row, by_cell
from statistics_of import gap_closed, interval

from train import final_of

PARSER = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
PARSER.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the results")
PARSER.add_argument("--seeds", type=int, default=10, help="2 or more, for an interval")
WHERE_NOT = "On text, and with other settings, it closed less or nothing: docs/study.md."


def trained(cell: Cell, best: dict[str, float], seeds: int) -> Row:
    """Return a row of results; `best` are the rates that the study's tuning has found."""
    return {**asdict(cell), "best": best, **final_of(cell, best, seeds=seeds)}


def table(rows: list[Row]) -> Table:
    shown = Table("algorithm", "one exchange in", caption="loss: mean, and its interval of 95 %")
    for name in ("rate", "momentum", "held-out loss", "kB sent"):
        shown.add_column(name, justify="right")
    for row in rows:
        best, period = row["best"], row["period"]
        when = "1 update" if period == 1 else f"{period} updates"
        ring = 2 * (row["replicas"] - 1) / row["replicas"]  # what a replica sends, of each byte
        sent = ring * 4 * PARAMETERS[row["part"]] * row["steps"] / period / 1000
        momentum = f"{best['momentum']:g}" if best["momentum"] else ""
        loss = "{:.3f} ± {:.3f}".format(*interval(row["test"]))
        shown.add_row(row["algorithm"], when, f"{best['rate']:.2g}", momentum, loss, f"{sent:,.0f}")
    return shown


def meaning(rows: list[Row]) -> str:
    """Return in a sentence what the rows say."""
    losses = {row["algorithm"]: row["test"] for row in rows}
    closed, low, high = gap_closed(losses[LOCAL_SGD], losses[SLOWMO], losses[ALL_REDUCE])
    diloco, *_ = gap_closed(losses[LOCAL_SGD], losses[DILOCO], losses[ALL_REDUCE])
    return (
        f"With the same 1/{rows[-1]['period']} of the bytes, slow momentum closes "
        f"{100 * closed:.0f} % ({100 * low:.0f} to {100 * high:.0f}) of the gap that plain "
        f"averages leave to an all-reduce in every update, and diloco {100 * diloco:.0f} %."
    )


def main() -> None:
    args, console = PARSER.parse_args(), Console()
    if args.seeds < 2:
        PARSER.error(f"--seeds must be >= 2, got {args.seeds}")
    first, recorded, rows = SHOWN[0], by_cell(), []
    console.print(
        f"Handwritten digits: {first.replicas} virtual replicas of a perceptron with 2,410 "
        f"parameters, 8 images each per update, {first.steps} updates of SGD with momentum, "
        f"{args.seeds} seeds.",
        highlight=False,
    )
    for cell in SHOWN:
        began = time.perf_counter()
        rows.append(trained(cell, recorded[cell]["best"], args.seeds))
        mean = interval(rows[-1]["test"])[0]
        took = f"{time.perf_counter() - began:.0f} s"
        console.print(f"{cell.algorithm}: held-out loss {mean:.3f} ({took})", highlight=False)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "demo.json").write_text(json.dumps(rows, indent=1))
    draw_runs(rows, args.out / "demo.png")
    console.print(table(rows))
    for line in (meaning(rows), WHERE_NOT, str(args.out / "demo.png")):
        console.print(line, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
