"""`jaxslowmo inspect graphs`."""

import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxslowmo.topology import GraphAnalysis, analyse, make_graph

from ..._support.files import write_anew
from .._errors import CommandError
from .._output import make_folder, say, write_json
from ..config._algorithms import parse_mixing
from ..figures._graphs import Curve, draw_graphs
from ._config import InspectGraphsConfig, check_effort, split_graph
from ._facts import FOREVER, graph_facts
from ._tables import QUANTITIES, Analyses, Quantity, cell, markdown, reasons

_POINTS = 100  # of a curve
BEGIN, END = "<!-- graphs: begin -->", "<!-- graphs: end -->"


def inspect_graphs(config: InspectGraphsConfig, out: Path | None, page: Path | None) -> int:
    """Writes the tables and the picture, shows the tables, and returns the exit code.

    Without a page, or with a folder too, graphs.md, graphs.json and graphs.png go to the folder.

    Raises:
      CommandError: if a file cannot be written, or the page lacks the markers.
    """
    console = Console()
    old = None if page is None else _split_page(page)
    folder = make_folder(out, "graphs") if page is None or out is not None else None
    analyses = analyse_all(config, show_progress=True)
    curves = picture_curves(config)
    text = markdown(config, analyses)
    written: list[Path] = []
    if folder is not None:
        facts = [
            {"name": name, "num_nodes": nodes}
            | ({"error": found} if isinstance(found, str) else graph_facts(found))
            for (name, nodes), found in analyses.items()
        ]
        write_json(folder / "graphs.json", {"config": vars(config), "graphs": facts})
        write_anew(folder / "graphs.md", text)
        written += [folder / "graphs.md", folder / "graphs.json", folder / "graphs.png"]
    if page is not None and old is not None:
        before, after = old
        try:
            write_anew(page, f"{before}{BEGIN}\n\n{text}\n{END}{after}")
        except OSError as error:
            raise CommandError(f"--page: cannot write {page}: {error.strerror}") from None
        written += [page, page.with_suffix(".png")]
    for path in written:
        if path.suffix == ".png":
            draw_graphs(curves, path, tolerance=config.tolerance, mixing=config.mixing)
    for quantity in QUANTITIES:
        console.print(_table(quantity, config, analyses))
    say(console, *reasons(analyses), *map(str, written))
    return 0


def analyse_all(config: InspectGraphsConfig, *, show_progress: bool = False) -> Analyses:
    """Every graph at every size; the reason where there is no such graph."""
    pairs = [(graph, nodes) for graph in config.graphs for nodes in config.nodes]
    console = Console(stderr=True)
    shown = track(
        pairs,
        "analysing",
        console=console,
        transient=True,
        disable=not show_progress or not sys.stderr.isatty(),
    )
    return {(graph, nodes): _analyse(graph, nodes, config) for graph, nodes in shown}


def _analyse(name: str, nodes: int, config: InspectGraphsConfig) -> GraphAnalysis | str:
    constructor, peers = split_graph(name)
    try:
        graph = check_effort("--nodes", make_graph(constructor, nodes, peers_per_step=peers))
        return analyse(graph, parse_mixing(config.mixing), tolerance=config.tolerance)
    except ValueError as error:
        return str(error)


def picture_curves(config: InspectGraphsConfig) -> dict[int, list[Curve]]:
    """Per number of nodes, the errors of those graphs that exist."""
    found: dict[int, list[Curve]] = {}
    for nodes in config.picture_nodes:
        found[nodes] = []
        for name in config.pictured:
            analysis = _analyse(name, nodes, config)
            if not isinstance(analysis, str):
                found[nodes].append(curve_of(name, analysis))
    return found


def curve_of(name: str, analysis: GraphAnalysis) -> Curve:
    """The errors of a graph, until they are a little below its tolerance."""
    last = analysis.rounds_to_tolerance
    last = FOREVER if last is None else int(1.2 * last) + 1
    later = (round(t) for t in np.geomspace(1, last, _POINTS))
    rounds = sorted({*range(min(last, _POINTS) + 1), *later})
    errors = tuple(analysis.error(t) for t in rounds)
    return Curve(name, tuple(rounds), errors, analysis.messages_max)


def _split_page(page: Path) -> tuple[str, str]:
    """What stands before and after the tables."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--page: cannot read {page}: {error.strerror}") from None
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise CommandError(f"--page: {page} must have a line {BEGIN} and, below it, one {END}")
    return before, after


def _table(quantity: Quantity, config: InspectGraphsConfig, analyses: Analyses) -> Table:
    table = Table(title=quantity.title(config), title_justify="left")
    table.add_column("graph", no_wrap=True)
    for nodes in config.nodes:
        table.add_column(str(nodes), justify="right", no_wrap=True)
    for graph in config.graphs:
        row = [cell(quantity, analyses[graph, nodes]) for nodes in config.nodes]
        table.add_row(graph, *row)
    return table
