"""`jaxslowmo inspect graphs`: tables that compare graphs, and their picture."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from rich.console import Console
from rich.progress import track
from rich.table import Column

from jaxslowmo.topology import GraphAnalysis, analyse, make_graph

from .._support.files import write_anew
from ._errors import CommandError, file_errors
from ._figures import COLOURS, INK, LineStyle, clean, draw_line, new_figure, save_figure
from ._inspect_graph import FOREVER, graph_facts
from ._output import numbers_table, say, write_json
from .config._algorithms import parse_mixing
from .config._inspect import InspectGraphsConfig, check_effort, split_graph
from .run._run_folder import make_folder

# Maps a graph and a number of nodes to the analysis, or to the reason why there is no such graph.
Analyses = Mapping[tuple[str, int], GraphAnalysis | str]

_NONE = "none"
_POINTS = 100  # the most points of a curve
BEGIN, END = "<!-- graphs: begin -->", "<!-- graphs: end -->"


def _rounds(analysis: GraphAnalysis) -> str:
    rounds = analysis.rounds_to_tolerance
    return "never" if rounds is None else str(rounds)


def _messages(analysis: GraphAnalysis) -> str:
    if analysis.messages_mean == analysis.messages_max:
        return str(analysis.messages_max)
    return f"{analysis.messages_mean:.1f} ({analysis.messages_max})"


def _messages_to_tolerance(analysis: GraphAnalysis) -> str:
    rounds = analysis.rounds_to_tolerance
    return "never" if rounds is None else str(rounds * analysis.messages_max)


_QUANTITIES: Mapping[str, Callable[[GraphAnalysis], str]] = {
    "Rounds to a consensus error of {:g}": _rounds,
    "Messages that a node sends per round: mean (and the busiest node)": _messages,
    "Messages that the busiest node sends until an error of {:g}": _messages_to_tolerance,
    "Spectral gap per round": lambda analysis: f"{analysis.spectral_gap_per_round:.2g}",
}


def tables(config: InspectGraphsConfig, analyses: Analyses) -> dict[str, dict[str, list[str]]]:
    """Return a table per quantity, by title: it maps a graph to a cell per number of nodes."""

    def cell(text: Callable[[GraphAnalysis], str], analysis: GraphAnalysis | str) -> str:
        return _NONE if isinstance(analysis, str) else text(analysis)

    return {
        title.format(config.tolerance): {
            graph: [cell(text, analyses[graph, nodes]) for nodes in config.nodes]
            for graph in config.graphs
        }
        for title, text in _QUANTITIES.items()
    }


def reasons(analyses: Analyses) -> list[str]:
    """Return a line for each graph that does not exist at some size."""
    return [
        f"{graph} with {nodes} nodes: {_NONE}, since {analysis}"
        for (graph, nodes), analysis in analyses.items()
        if isinstance(analysis, str)
    ]


def markdown(config: InspectGraphsConfig, analyses: Analyses) -> str:
    """Return all tables in Markdown, and the reasons for cells without a number."""
    parts = [f"Mixing: {config.mixing}. NAME:2 sends to 2 peers per step.\n"]
    for title, rows in tables(config, analyses).items():
        lines = [
            f"| nodes | {' | '.join(map(str, config.nodes))} |",
            f"|---|{'---:|' * len(config.nodes)}",
            *(f"| {graph} | {' | '.join(cells)} |" for graph, cells in rows.items()),
        ]
        parts += [f"**{title}**\n", "\n".join(lines) + "\n"]
    missing = reasons(analyses)
    if missing:
        parts.append("\n".join(f"- {line}" for line in missing) + "\n")
    return "\n".join(parts)


@dataclasses.dataclass(frozen=True)
class Curve:
    """The consensus error of one graph.

    Attributes:
      name: name of the graph.
      rounds: numbers of rounds, ascending from 0.
      errors: the error after each of them.
      messages: number of messages that the busiest node sends per round.
    """

    name: str
    rounds: tuple[int, ...]
    errors: tuple[float, ...]
    messages: int


def draw_graphs(
    curves: Mapping[int, Sequence[Curve]], path: Path, *, tolerance: float, mixing: str
) -> None:
    """Draw errors against rounds, and against messages of the busiest node.

    Args:
      curves: maps a number of nodes to the curves in its row of the picture.
      path: path of the PNG.
      tolerance: error at which a dashed line is drawn.
      mixing: name of the mixing, for the subtitle.
    """
    height = 3.4 * len(curves) + 1.6
    about = "largest distance of all nodes from the mean, 1 at the start; log scales"
    lines = "How fast graphs mix", f"{mixing} mixing; {about}"
    figure = new_figure((11, height), *lines, bottom=0.65, wspace=0.05, hspace=0.06)
    grid = figure.subplots(len(curves), 2, sharey=True, sharex="col", squeeze=False)
    styles, floor = _styles(curves), tolerance / 3
    for (nodes, row), (by_rounds, by_messages) in zip(curves.items(), grid, strict=True):
        for curve in row:
            style = styles[curve.name]
            _draw(by_rounds, curve, 1, floor, style)
            _draw(by_messages, curve, curve.messages, floor, style)
        by_rounds.set_ylabel(f"{nodes} nodes\nconsensus error")
        for axes in (by_rounds, by_messages):
            _scale(axes, tolerance, floor)
    for axes in grid[0]:  # the axes of a column share their limits
        axes.set_xlim(left=0)
    grid[-1][0].set_xlabel("rounds")
    grid[-1][1].set_xlabel("messages that the busiest node sends, each of the size of the model")
    handles = [Line2D([], [], **style, label=name) for name, style in styles.items()]
    figure.legend(
        handles=handles, loc="lower center", ncols=5, frameon=False, labelcolor=INK, fontsize=9.5
    )
    save_figure(figure, path)


def _styles(curves: Mapping[int, Sequence[Curve]]) -> dict[str, LineStyle]:
    names = dict.fromkeys(curve.name for row in curves.values() for curve in row)
    # Each colour has a marker; when all are used, they are used again with dashed lines.
    looks = itertools.product(("-", "--"), zip(COLOURS.values(), "oXDP^vps*", strict=True))
    return {
        name: {"color": colour, "marker": marker, "linestyle": line}
        for name, (line, (colour, marker)) in zip(names, itertools.cycle(looks), strict=False)
    }


def _draw(axes: Axes, curve: Curve, scale: int, floor: float, style: LineStyle) -> None:
    # Drawn as steps, since nothing happens between two rounds: straight lines would show progress
    # before the first round ends. A logarithmic axis cannot show an error of 0, so there the line
    # leaves the picture.
    errors = np.maximum(curve.errors, floor / 1.2)
    shown = 1 + np.searchsorted(-errors, -floor)
    xs = scale * np.array(curve.rounds)[:shown]
    draw_line(axes, xs, errors[:shown], style, drawstyle="steps-post", markevery=0.12)


def _scale(axes: Axes, tolerance: float, floor: float) -> None:
    axes.set_xscale("symlog", linthresh=1, linscale=0.3)  # linear near 0
    axes.set_yscale("log")
    axes.set_ylim(floor, 1.3)
    axes.axhline(tolerance, color="#777777", linewidth=0.9, linestyle=(0, (4, 3)))
    clean(axes)
    axes.tick_params(labelbottom=True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def inspect_graphs(config: InspectGraphsConfig) -> int:
    """Write the tables and the picture, print the tables, and return the exit code.

    Without `--page`, or with `--out`, it writes graphs.md, graphs.json and graphs.png to a folder.

    Raises:
      CommandError: a file cannot be written, or the page lacks the markers.
    """
    console, out, page = Console(), config.out, config.page
    old = None if page is None else _split_page(page)
    folder = make_folder(out, "graphs") if page is None or out is not None else None
    analyses = analyse_all(config, show_progress=True)
    curves = picture_curves(config)
    text = markdown(config, analyses)
    written: list[Path] = []
    if folder is not None:
        facts = [
            {"name": name, "num_nodes": nodes}
            | ({"error": value} if isinstance(value, str) else graph_facts(value))
            for (name, nodes), value in analyses.items()
        ]
        about = vars(config) | {"pictured": config.pictured}
        write_json(folder / "graphs.json", {"config": about, "graphs": facts})
        write_anew(folder / "graphs.md", text)
        written += [folder / "graphs.md", folder / "graphs.json", folder / "graphs.png"]
    if page is not None and old is not None:
        before, after = old
        with file_errors("--page", "write", page):
            write_anew(page, f"{before}{BEGIN}\n\n{text}\n{END}{after}")
        written += [page, page.with_suffix(".png")]
    for path in written:
        if path.suffix == ".png":
            draw_graphs(curves, path, tolerance=config.tolerance, mixing=config.mixing)
    for title, rows in tables(config, analyses).items():
        first, sizes = Column("graph", no_wrap=True), map(str, config.nodes)
        table = numbers_table(first, sizes, title=title, title_justify="left")
        for graph, cells in rows.items():
            table.add_row(graph, *cells)
        console.print(table)
    say(console, *reasons(analyses), *map(str, written))
    return 0


def analyse_all(config: InspectGraphsConfig, *, show_progress: bool = False) -> Analyses:
    """Return the analysis of every graph at every size, or the reason why there is none."""
    pairs = [(graph, nodes) for graph in config.graphs for nodes in config.nodes]
    console = Console(stderr=True)
    is_silent = not show_progress or not sys.stderr.isatty()
    shown = track(pairs, "analysing", console=console, transient=True, disable=is_silent)
    return {(graph, nodes): _analyse(graph, nodes, config) for graph, nodes in shown}


def _analyse(name: str, nodes: int, config: InspectGraphsConfig) -> GraphAnalysis | str:
    constructor, peers = split_graph(name)
    try:
        graph = check_effort("--nodes", make_graph(constructor, nodes, peers_per_step=peers))
        return analyse(graph, parse_mixing(config.mixing), tolerance=config.tolerance)
    except ValueError as error:
        return str(error)


def picture_curves(config: InspectGraphsConfig) -> dict[int, list[Curve]]:
    """Return the curves of all graphs that exist, by number of nodes."""
    curves: dict[int, list[Curve]] = {}
    for nodes in config.picture_nodes:
        curves[nodes] = []
        for name in config.pictured:
            analysis = _analyse(name, nodes, config)
            if not isinstance(analysis, str):
                curves[nodes].append(curve_of(name, analysis))
    return curves


def curve_of(name: str, analysis: GraphAnalysis) -> Curve:
    """Return the errors of a graph, until they are a little below the tolerance."""
    last = analysis.rounds_to_tolerance
    last = FOREVER if last is None else int(1.2 * last) + 1
    later = (round(t) for t in np.geomspace(1, last, _POINTS))
    rounds = sorted({*range(min(last, _POINTS) + 1), *later})
    errors = tuple(analysis.error(t) for t in rounds)
    return Curve(name, tuple(rounds), errors, analysis.messages_max)


def _split_page(page: Path) -> tuple[str, str]:
    """Return the text of a page before and after the tables."""
    with file_errors("--page", "read", page):
        text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise CommandError(f"--page: {page} must have a line {BEGIN} and, below it, one {END}")
    return before, after
