"""Writes benchmarks/results/study_by_size.md and docs/study-size.png from the rows of gpu_study.py.

    python benchmarks/gpu_study_report.py

The price of an algorithm is its held-out loss over that of the all-reduce with the same model, text
and batches after equally many updates, less one. The loss is the mean over held-out families of
packages; the interval of 95 % is that of 4,000 samples of the families with replacement, the same
ones for both. It says how the price varies with the text, not how it varies with the seed.
"""

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gpu_study import (
    ALGORITHMS,
    ALL_REDUCE,
    EXPERIMENTS,
    MARKS,
    RESULTS,
    ROOT,
    Results,
    key_of,
    make_plan,
    read_rows,
    size_of,
)

from jaxslowmo.cli._figures import COLOURS, INK, clean, draw_line, new_figure, save_figure

PAGE = ROOT / "benchmarks" / "results" / "study_by_size.md"
PICTURE = ROOT / "docs" / "study-size.png"
SIZES = ("1m", "10m", "40m", "124m")
# Scaling laws for DiLoCo (arXiv 2503.09799), table 4: loss of data parallelism, and of DiLoCo with
# 4 replicas, every 30 updates, 20 tokens per parameter.
PUBLISHED = {
    35e6: (3.485, 3.554),
    90e6: (3.167, 3.213),
    180e6: (2.950, 2.981),
    335e6: (2.784, 2.808),
    550e6: (2.653, 2.673),
    1.3e9: (2.460, 2.472),
    2.4e9: (2.326, 2.332),
}
STYLES = {
    "local_sgd": ("blue", "s"),
    "slowmo": ("vermilion", "D"),
    "diloco": ("green", "^"),
    "diloco, int4": ("orange", "v"),
    "diloco, 4 fragments, delay": ("pink", "P"),
}


def law(size: Any) -> Any:
    """Return the price of DiLoCo with 4 replicas by the fits of the scaling laws."""
    return 19.762 * size**-0.0992 / (18.129 * size**-0.0953) - 1


class Price(NamedTuple):
    """The price of an algorithm after some updates.

    Attributes:
      row: the row of the algorithm.
      updates: number of updates.
      losses: the losses of the all-reduce and of the algorithm.
      price: the second over the first, less one.
      low, high: ends of the interval.
    """

    row: Mapping[str, Any]
    updates: int
    losses: tuple[float, float]
    price: float
    low: float
    high: float

    @property
    def bytes_per_parameter(self) -> float:
        return self.updates * self.row["bytes_per_update"] / self.row["parameters"]


def price(row: Mapping[str, Any], reference: Mapping[str, Any], updates: int) -> Price:
    """Return the price of a row beside its reference, both evaluated after so many updates."""
    losses = np.array([curve(x)[updates] for x in (reference, row)])
    draws = np.random.default_rng(0).integers(losses.shape[1], size=(4000, losses.shape[1]))
    base, other = losses[:, draws].mean(-1)
    low, high = np.quantile(other / base - 1, [0.025, 0.975])
    base, other = losses.mean(1)
    return Price(row, updates, (base, other), other / base - 1, low, high)


def curve(row: Mapping[str, Any]) -> dict[int, list[float]]:
    return {point["updates"]: point["losses"] for point in row["history"]}


def prices(rows: Iterable[Mapping[str, Any]]) -> list[list[Price]]:
    """Return the prices of each row after all updates at which both have been evaluated."""
    by_key = {key_of(row): row for row in rows}
    found = []
    for row in by_key.values():
        preset, algorithm, updates, text = key_of(row)
        reference = by_key.get((preset, ALL_REDUCE, updates, text))
        if algorithm == ALL_REDUCE or reference is None:
            continue
        common = sorted(curve(row).keys() & curve(reference).keys())
        if common:
            found.append([price(row, reference, x) for x in common])
    order = [*SIZES, "tiny"]
    names = list(ALGORITHMS)
    return sorted(
        found,
        key=lambda x: (order.index(x[0].row["preset"]), names.index(x[0].row["algorithm"])),
    )


def percent(one: Price) -> str:
    return f"{100 * one.price:+.1f} % ({100 * one.low:+.1f} to {100 * one.high:+.1f})"


def price_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the prices at the end of each run, and where sizes are compared."""
    found = prices(rows)
    if not found:
        return "Nothing was measured."
    marks = [f"{mark:g} bytes" for mark in MARKS]
    lines = [["model", "algorithm", "loss", "`all_reduce`", "at the end", *marks, "of the run"]]
    for points in found:
        row, last = points[0].row, points[-1]
        base, loss = last.losses
        cells = [at(points, mark) for mark in MARKS]
        share = f"{last.bytes_per_parameter:.2f} bytes, {100 * last.updates / row['updates']:.0f} %"
        name = f"`{row['preset']}`", f"{row['algorithm']}"
        lines.append([*name, f"{loss:.3f}", f"{base:.3f}", percent(last), *cells, share])
    return table(lines)


def at(points: Sequence[Price], mark: float) -> str:
    """Return the price after so many bytes per parameter, or nothing where there is none."""
    row = points[0].row
    period = 16 * row["bytes_per_update"] / row["parameters"]  # updates are multiples of 32
    near = [x for x in points if abs(x.bytes_per_parameter - mark) <= period * 1.001]
    return percent(near[0]) if near else ""


def law_table() -> str:
    lines = [["preset", "parameters", "price of DiLoCo by the fits"]]
    for name in SIZES:
        size = size_of(name)
        lines.append([f"`{name}`", f"{size:,}", f"{100 * law(size):.1f} %"])
    return table(lines)


def plan_table(measured: Mapping[str, Any]) -> str:
    names = ["experiment", "bytes per parameter", "runs", "updates", "ms, estimated"]
    lines = [[*names, "seconds of 660", "measured"]]
    for row in make_plan(EXPERIMENTS, measured)["experiments"]:
        numbers, done = row["estimate"], (row["measured"] or {}).get("done", {})
        parts = [f"{name}: {100 * x / numbers['updates']:.0f} %" for name, x in done.items()]
        seconds = f"{numbers['training_seconds']} + {numbers['other_seconds']}"
        lines.append(
            [
                row["name"],
                f"{row['bytes_per_parameter']:g}",
                "; ".join(row["algorithms"]),
                f"{numbers['updates']:,}",
                f"{numbers['milliseconds_per_update']}",
                seconds,
                "; ".join(parts) or "no",
            ]
        )
    return table(lines)


def table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = lines
    rule = ["---", *["---:" if re.match(r"[-+\d]", x) else "---" for x in rest[0][1:]]]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rest))


def draw(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draw the price of each algorithm at the end of its runs against size, beside the law."""
    found = [points[-1] for points in prices(rows)]
    title = "What rare exchanges cost, by size of the model"
    what = (
        "Held-out loss above that of an all-reduce in every update, 4 replicas. Grey: the scaling "
        "laws of DiLoCo (arXiv 2503.09799, every 30 updates, C4): fits, extended below 35 million "
        "parameters (dashed), and table 4 (dots). "
    )
    what += (
        "Bars: 95 % over held-out packages; numbers: bytes per parameter."
        if found
        else "Dotted: the presets that are to be measured. Nothing was measured."
    )
    figure = new_figure((9, 5), title, what)
    axes = figure.subplots()
    least = min([1e6, *(x.row["parameters"] for x in found)])
    for ends, style in (((35e6, 3e9), "-"), ((least, 35e6), "--")):
        sizes = np.geomspace(*ends, 50)
        label = "DiLoCo, by the fits" if style == "-" else None
        axes.plot(sizes, 100 * law(sizes), color=COLOURS["grey"], linestyle=style, label=label)
    published = [100 * (other / base - 1) for base, other in PUBLISHED.values()]
    dots = {"color": COLOURS["grey"], "marker": "o", "linestyle": ""}
    draw_line(axes, list(PUBLISHED), published, dots, label="DiLoCo, published")
    for number, (name, (colour, marker)) in enumerate(STYLES.items()):
        points = [x for x in found if x.row["algorithm"] == name]
        if not points:
            continue
        # Side by side, where sizes are equal.
        xs = [x.row["parameters"] * 1.05 ** (number - len(STYLES) // 2) for x in points]
        ys = 100 * np.array([x.price for x in points])
        ends = 100 * np.array([[x.price - x.low, x.high - x.price] for x in points]).T
        look = {"color": COLOURS[colour], "marker": marker, "linestyle": ""}
        axes.errorbar(
            xs, ys, np.maximum(ends, 0), color=COLOURS[colour], linewidth=0, elinewidth=1.2
        )
        draw_line(axes, xs, ys, look, label=name)
        for x, y, one in zip(xs, ys, points, strict=True):
            beside = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(f"{one.bytes_per_parameter:.2g}", (x, y), color=INK, size=7.5, **beside)
    for name in SIZES:
        size = size_of(name)
        axes.axvline(size, color=COLOURS["grey"], linewidth=0.6, linestyle=":")
        above = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        axes.annotate(name, (size, 1), color=INK, size=8.5, **above)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set(xscale="log", xlabel="parameters", ylabel="% above the loss of the all-reduce")
    axes.legend(frameon=False, labelcolor=INK, fontsize=8.5)
    clean(axes)
    save_figure(figure, path)


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with what stands between the markers of each table replaced."""
    for name, text in tables.items():
        begin, end = f"<!-- study-size:{name} -->", f"<!-- /study-size:{name} -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"the page must have {begin} ... {end}")
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page


def tables(results: Results) -> dict[str, str]:
    rows = results.rows.values()
    return {
        "law": law_table(),
        "plan": plan_table(results.measured),
        "prices": price_table(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.parse_args()
    results = Results(RESULTS, EXPERIMENTS, {})
    PAGE.write_text(with_tables(PAGE.read_text("utf-8"), tables(results)), "utf-8")
    draw(read_rows(RESULTS), PICTURE)
    print(f"Written to {PAGE} and {PICTURE}")


if __name__ == "__main__":
    main()
