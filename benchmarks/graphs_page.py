"""Writes docs/graphs.png and the tables of benchmarks/results/graphs.md.

    python benchmarks/graphs_page.py

For graphs of your own call `js.topology.analyse`, as docs/choosing.md shows.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.rcsetup import cycler

from jaxslowmo.cli._figures import COLOURS, INK, clean, draw_line, new_figure, save_figure
from jaxslowmo.topology import GRAPHS, GraphAnalysis, analyse, make_graph

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "results" / "graphs.md"
PICTURE = ROOT / "docs" / "graphs.png"
BEGIN, END = "<!-- graphs: begin -->", "<!-- graphs: end -->"
NODES, PICTURED_NODES = (4, 8, 16, 32, 64, 128, 256), (16, 64)
TOLERANCE = 1e-3
# Graphs that are compared with 2 peers per step, too.
_TWICE = ("npeer_directed_exponential", "directed_linear", "ring")
ALL = [
    name for graph in GRAPHS for name in (graph, f"{graph}:2") if name in GRAPHS or graph in _TWICE
]
# More lines would hide each other.
_PICTURED = (
    "complete", "star", "npeer_directed_exponential", "inner_outer", "symmetric_exponential",
    "random_matching", "torus_2d", "ring:2", "ring",
)  # fmt: skip
_POINTS = 100  # the most points of a curve


def analysis_of(name: str, nodes: int) -> GraphAnalysis:
    """Return the analysis of a graph such as "ring", or "ring:2" with 2 peers per step."""
    constructor, _, peers = name.partition(":")
    graph = make_graph(constructor, nodes, peers_per_step=int(peers) if peers else None)
    return analyse(graph, tolerance=TOLERANCE)


def _messages(analysis: GraphAnalysis) -> str:
    if analysis.messages_mean == analysis.messages_max:
        return str(analysis.messages_max)
    return f"{analysis.messages_mean:.1f} ({analysis.messages_max})"


_QUANTITIES: Mapping[str, Callable[[GraphAnalysis], str]] = {
    f"Rounds to a consensus error of {TOLERANCE:g}": lambda x: str(x.rounds_to_tolerance),
    "Messages that a node sends per round: mean (and the busiest node)": _messages,
}


def tables(nodes: Sequence[int] = NODES) -> str:
    """Return a table per quantity in Markdown."""
    parts = ["Mixing: uniform. NAME:2 sends to 2 peers per step.\n"]
    analyses = {name: [analysis_of(name, count) for count in nodes] for name in ALL}
    head = f"| nodes | {' | '.join(map(str, nodes))} |\n|---|{'---:|' * len(nodes)}\n"
    for title, text in _QUANTITIES.items():
        rows = (f"| {name} | {' | '.join(map(text, row))} |\n" for name, row in analyses.items())
        parts += [f"**{title}**\n", head + "".join(rows)]
    return "\n".join(parts)


def draw(path: Path, sizes: Sequence[int] = PICTURED_NODES) -> None:
    """Draw errors against rounds, and against messages of the busiest node: a row per size."""
    floor = TOLERANCE / 3
    about = (
        "uniform mixing; largest distance of all nodes from the mean, 1 at the start; log scales"
    )
    size = (11, 3.4 * len(sizes) + 1.6)
    figure = new_figure(size, "How fast graphs mix", about, wspace=0.05, hspace=0.06)
    grid = figure.subplots(len(sizes), 2, sharey=True, sharex="col", squeeze=False)
    looks = cycler(color=list(COLOURS.values())) + cycler(marker=list("oXDP^vps*"))
    styles = dict(zip(_PICTURED, looks, strict=True))
    drawn: dict[str, Line2D] = {}
    for nodes, row in zip(sizes, grid, strict=True):
        for name, style in styles.items():
            analysis = analysis_of(name, nodes)
            assert analysis.rounds_to_tolerance is not None, "all of these mix"
            last = int(1.2 * analysis.rounds_to_tolerance) + 1
            rounds = {*range(min(last, _POINTS) + 1), *np.geomspace(1, last, _POINTS, dtype=int)}
            # A logarithmic axis cannot show an error of 0, so there the line leaves the picture.
            errors = [max(analysis.error(int(t)), floor / 1.2) for t in sorted(rounds)]
            for axes, scale in zip(row, (1, analysis.messages_max), strict=True):
                # Steps, since nothing happens between two rounds: straight lines would show
                # progress before the first round ends.
                xs, options = [scale * t for t in sorted(rounds)], {"drawstyle": "steps-post"}
                drawn[name] = draw_line(axes, xs, errors, style, markevery=0.12, **options)
        row[0].set_ylabel(f"{nodes} nodes\nconsensus error")
        for axes in row:
            axes.set_xscale("symlog", linthresh=1, linscale=0.3)  # linear near 0
            axes.set(yscale="log", ylim=(floor, 1.3))
            axes.axhline(TOLERANCE, color=INK, linewidth=0.9, linestyle="--")
            clean(axes)
            axes.tick_params(labelbottom=True)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_major_formatter("{x:g}")
    for axes in grid[0]:  # the axes of a column share their limits, which all lines decide
        axes.set_xlim(left=0)
    grid[-1][0].set_xlabel("rounds")
    grid[-1][1].set_xlabel("messages that the busiest node sends, each of the size of the model")
    options = {"loc": "outside lower center", "ncols": 5, "frameon": False, "fontsize": 9.5}
    figure.legend(list(drawn.values()), list(drawn), **options)
    save_figure(figure, path)


def main() -> None:
    before, _, after = re.split(f"{BEGIN}|{END}", PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n{END}{after}", encoding="utf-8")
    draw(PICTURE)


if __name__ == "__main__":
    main()
