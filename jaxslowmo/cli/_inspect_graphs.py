"""`jaxslowmo inspect graphs`: tables that compare graphs, and their picture."""

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from rich.console import Console
from rich.progress import track
from rich.table import Column

from jaxslowmo.topology import GraphAnalysis, analyse, make_graph

from .._support.files import write_anew
from ._errors import CommandError, file_errors
from ._figures import COLOURS, INK, LineStyle, clean, draw_line, new_figure, save_figure
from ._inspect_graph import FOREVER, graph_facts
from ._output import numbers_table, say, write_json
from .config._inspect import InspectGraphsConfig, check_effort, split_graph
from .config._training import parse_mixing
from .run._run_folder import make_folder

# Maps a graph and a number of nodes to the analysis, or to the reason why there is no such graph.
Analyses = Mapping[tuple[str, int], GraphAnalysis | str]

_NONE = "none"
_POINTS = 100  # the most points of a curve
BEGIN, END = "<!-- graphs: begin -->", "<!-- graphs: end -->"


def _rounds(analysis: GraphAnalysis, each: int = 1) -> str:
    """Return the rounds to the tolerance, times `each`."""
    rounds = analysis.rounds_to_tolerance
    return "never" if rounds is None else str(each * rounds)


def _messages(analysis: GraphAnalysis) -> str:
    if analysis.messages_mean == analysis.messages_max:
        return str(analysis.messages_max)
    return f"{analysis.messages_mean:.1f} ({analysis.messages_max})"


_QUANTITIES: Mapping[str, Callable[[GraphAnalysis], str]] = {
    "Rounds to a consensus error of {:g}": _rounds,
    "Messages that a node sends per round: mean (and the busiest node)": _messages,
    "Messages that the busiest node sends until an error of {:g}": lambda analysis: _rounds(
        analysis, analysis.messages_max
    ),
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
    head = f"| nodes | {' | '.join(map(str, config.nodes))} |\n|---|{'---:|' * len(config.nodes)}"
    for title, rows in tables(config, analyses).items():
        lines = [f"| {graph} | {' | '.join(cells)} |\n" for graph, cells in rows.items()]
        parts += [f"**{title}**\n", f"{head}\n{''.join(lines)}"]
    missing = [f"- {line}\n" for line in reasons(analyses)]
    return "\n".join([*parts, "".join(missing)] if missing else parts)


def draw_graphs(config: InspectGraphsConfig, path: Path) -> None:
    """Draw errors against rounds, and against messages of the busiest node.

    A row of the picture shows all graphs that exist with one number of nodes.

    Args:
      config: the graphs; the tolerance is drawn as a dashed line.
      path: path of the PNG.
    """
    sizes, floor = config.picture_nodes, config.tolerance / 3
    about = "largest distance of all nodes from the mean, 1 at the start; log scales"
    lines = "How fast graphs mix", f"{config.mixing} mixing; {about}"
    spaces: Any = {"bottom": 0.65, "wspace": 0.05, "hspace": 0.06}
    figure = new_figure((11, 3.4 * len(sizes) + 1.6), *lines, **spaces)
    grid = figure.subplots(len(sizes), 2, sharey=True, sharex="col", squeeze=False)
    drawn: dict[str, LineStyle] = {}
    styles = _styles(config.pictured)
    for nodes, row in zip(sizes, grid, strict=True):
        for name in config.pictured:
            analysis = _analyse(name, nodes, config)
            if isinstance(analysis, str):
                continue
            drawn[name] = styles[name]
            rounds = _rounds_of_curve(analysis)
            errors = np.array([analysis.error(t) for t in rounds])
            shown = 1 + np.searchsorted(-errors, -floor)
            # A logarithmic axis cannot show an error of 0, so there the line leaves the picture.
            errors = np.maximum(errors, floor / 1.2)[:shown]
            for axes, scale in zip(row, (1, analysis.messages_max), strict=True):
                xs = scale * np.array(rounds)[:shown]
                # Steps, since nothing happens between two rounds: straight lines would show
                # progress before the first round ends.
                options = {"drawstyle": "steps-post", "markevery": 0.12}
                draw_line(axes, xs, errors, styles[name], **options)
        row[0].set_ylabel(f"{nodes} nodes\nconsensus error")
        for axes in row:
            axes.set_xscale("symlog", linthresh=1, linscale=0.3)  # linear near 0
            axes.set(yscale="log", ylim=(floor, 1.3))
            axes.axhline(config.tolerance, color="#777777", linewidth=0.9, linestyle="--")
            clean(axes)
            axes.tick_params(labelbottom=True)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_major_formatter("{x:g}")
    for axes in grid[0]:  # the axes of a column share their limits
        axes.set_xlim(left=0)
    grid[-1][0].set_xlabel("rounds")
    grid[-1][1].set_xlabel("messages that the busiest node sends, each of the size of the model")
    handles = [Line2D([], [], **style, label=name) for name, style in drawn.items()]
    figure.legend(
        handles=handles, loc="lower center", ncols=5, frameon=False, labelcolor=INK, fontsize=9.5
    )
    save_figure(figure, path)


def _rounds_of_curve(analysis: GraphAnalysis) -> list[int]:
    """Return numbers of rounds, until the error is a little below the tolerance."""
    last = analysis.rounds_to_tolerance
    last = FOREVER if last is None else int(1.2 * last) + 1
    later = (round(t) for t in np.geomspace(1, last, _POINTS))
    return sorted({*range(min(last, _POINTS) + 1), *later})


def _styles(names: Iterable[str]) -> dict[str, LineStyle]:
    # Each colour has a marker; when all are used, they are used again with dashed lines.
    looks = itertools.product(("-", "--"), zip(COLOURS.values(), "oXDP^vps*", strict=True))
    return {
        name: {"color": colour, "marker": marker, "linestyle": line}
        for name, (line, (colour, marker)) in zip(names, itertools.cycle(looks), strict=False)
    }


def inspect_graphs(config: InspectGraphsConfig) -> int:
    """Write the tables and the picture, print the tables, and return the exit code.

    Without `--page`, or with `--out`, it writes graphs.md, graphs.json and graphs.png to a folder.

    Raises:
      CommandError: a file cannot be written, or the page lacks the markers.
    """
    console, page = Console(), config.page
    old = None if page is None else _split_page(page)
    folder = make_folder(config.out, "graphs") if page is None or config.out is not None else None
    analyses = analyse_all(config, show_progress=True)
    text = markdown(config, analyses)
    written: list[Path] = []
    if folder is not None:
        facts = [
            {"name": name, "num_nodes": nodes}
            | ({"error": value} if isinstance(value, str) else graph_facts(value))
            for (name, nodes), value in analyses.items()
        ]
        about = vars(config) | {"pictured": config.pictured}
        written += [folder / f"graphs.{kind}" for kind in ("md", "json", "png")]
        write_anew(written[0], text)
        write_json(written[1], {"config": about, "graphs": facts})
    if page is not None and old is not None:
        before, after = old
        with file_errors("--page", "write", page):
            write_anew(page, f"{before}{BEGIN}\n\n{text}\n{END}{after}")
        written += [page, page.with_suffix(".png")]
    for path in written:
        if path.suffix == ".png":
            draw_graphs(config, path)
    for title, rows in tables(config, analyses).items():
        cells = ([graph, *texts] for graph, texts in rows.items())
        sizes = map(str, config.nodes)
        console.print(numbers_table(Column("graph", no_wrap=True), sizes, cells, title=title))
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


def _split_page(page: Path) -> tuple[str, str]:
    """Return the text of a page before and after the tables."""
    with file_errors("--page", "read", page):
        text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise CommandError(f"--page: {page} must have a line {BEGIN} and, below it, one {END}")
    return before, after
