"""`jaxslowmo inspect graphs`: tables that compare graphs, and their picture."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.rcsetup import cycler
from rich.console import Console
from rich.markdown import Markdown

from jaxslowmo.topology import GraphAnalysis, analyse, make_graph

from .._support.files import write_anew
from ._errors import CommandError, file_errors
from ._figures import COLOURS, INK, clean, draw_line, new_figure, save_figure
from ._inspect_graph import FOREVER, graph_facts
from ._output import say, tracked, write_json
from .config._inspect import InspectGraphsConfig, check_effort, split_graph
from .config._training import parse_mixing
from .run._run_folder import make_folder

# Maps a graph and a number of nodes to the analysis, or to the reason why there is no such graph.
Analyses = Mapping[tuple[str, int], GraphAnalysis | str]

_POINTS = 100  # the most points of a curve
ON_PAGE = 2  # tables on a page: with the rounds and the messages of a round a reader can choose
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


def markdown(config: InspectGraphsConfig, analyses: Analyses, tables: int | None = None) -> str:
    """Return a table per quantity in Markdown, and the reasons for cells without a number.

    Args:
      config: the graphs and the numbers of nodes.
      analyses: what `analyse_all` returns for them.
      tables: how many of the tables, the first ones; None means all.
    """
    parts = [f"Mixing: {config.mixing}. NAME:2 sends to 2 peers per step.\n"]
    head = f"| nodes | {' | '.join(map(str, config.nodes))} |\n|---|{'---:|' * len(config.nodes)}\n"
    for title, text in list(_QUANTITIES.items())[:tables]:
        table = head
        for graph in config.graphs:
            row = [analyses[graph, nodes] for nodes in config.nodes]
            cells = ("none" if isinstance(found, str) else text(found) for found in row)
            table += f"| {graph} | {' | '.join(cells)} |\n"
        parts += [f"**{title.format(config.tolerance)}**\n", table]
    reasons = [
        f"- {graph} with {nodes} nodes: none, since {found}\n"
        for (graph, nodes), found in analyses.items()
        if isinstance(found, str)
    ]
    return "\n".join([*parts, "".join(reasons)] if reasons else parts)


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
    figure = new_figure((11, 3.4 * len(sizes) + 1.6), *lines, wspace=0.05, hspace=0.06)
    grid = figure.subplots(len(sizes), 2, sharey=True, sharex="col", squeeze=False)
    # Each colour has a marker; when all are used, they are used again with dashed lines.
    colours = cycler(color=list(COLOURS.values())) + cycler(marker=list("oXDP^vps*"))
    looks = (cycler(linestyle=["-", "--"]) * colours)()
    styles = {name: next(looks) for name in config.pictured}
    drawn: dict[str, Line2D] = {}
    for nodes, row in zip(sizes, grid, strict=True):
        for name, style in styles.items():
            analysis = _analyse(name, nodes, config)
            if isinstance(analysis, str):
                continue
            last = analysis.rounds_to_tolerance
            last = FOREVER if last is None else int(1.2 * last) + 1
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
            axes.axhline(config.tolerance, color=INK, linewidth=0.9, linestyle="--")
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


def inspect_graphs(config: InspectGraphsConfig) -> int:
    """Write the tables and the picture, print the tables, and return the exit code.

    Without `--page`, or with `--out`, it writes graphs.md, graphs.json and graphs.png to a folder.
    A page gets the picture and the first tables.

    Raises:
      CommandError: a file cannot be written, or the page lacks the markers.
    """
    console, page = Console(), config.page
    around = [] if page is None else _around_tables(page)
    folder = make_folder(config.out, "graphs") if page is None or config.out is not None else None
    analyses = analyse_all(config)
    text = markdown(config, analyses)
    written: list[Path] = []
    if folder is not None:
        facts = [
            {"name": name, "num_nodes": nodes}
            | ({"error": value} if isinstance(value, str) else graph_facts(value))
            for (name, nodes), value in analyses.items()
        ]
        written += [folder / f"graphs.{kind}" for kind in ("md", "json", "png")]
        write_anew(written[0], text)
        about = vars(config) | {"pictured": config.pictured}
        write_json(written[1], {"config": about, "graphs": facts})
        draw_graphs(config, written[2])
    if page is not None:
        written += [page, page.with_suffix(".png")]
        with file_errors("--page", "write", page):
            first = markdown(config, analyses, ON_PAGE)
            write_anew(page, f"\n\n{first}\n".join([around[0] + BEGIN, END + around[2]]))
            draw_graphs(config, written[-1])
    console.print(Markdown(text))
    say(console, *map(str, written))
    return 0


def analyse_all(config: InspectGraphsConfig) -> Analyses:
    """Return the analysis of every graph at every size, or the reason why there is none."""
    pairs = [(graph, nodes) for graph in config.graphs for nodes in config.nodes]
    shown = tracked(pairs, "analysing", Console())
    return {(graph, nodes): _analyse(graph, nodes, config) for graph, nodes in shown}


def _analyse(name: str, nodes: int, config: InspectGraphsConfig) -> GraphAnalysis | str:
    constructor, peers = split_graph(name)
    try:
        graph = check_effort("--nodes", make_graph(constructor, nodes, peers_per_step=peers))
        return analyse(graph, parse_mixing(config.mixing), tolerance=config.tolerance)
    except ValueError as error:
        return str(error)


def _around_tables(page: Path) -> list[str]:
    """Return the text of a page before, between and after the markers."""
    with file_errors("--page", "read", page):
        parts = re.split(f"{BEGIN}|{END}", page.read_text(encoding="utf-8"))
    if len(parts) != 3:
        raise CommandError(f"--page: {page} must have a line {BEGIN} and, below it, one {END}")
    return parts
