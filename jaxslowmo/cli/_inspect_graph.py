"""`jaxslowmo inspect graph`: the analysis of one graph, as tables or JSON."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from jaxslowmo.topology import Graph, GraphAnalysis

from ._errors import usage_errors
from ._output import facts_table, numbers_table
from .config._inspect import InspectGraphConfig

FOREVER = 1024  # rounds that are shown for nodes that never agree
_MOST_ROWS = 16
_MOST_PEERS = 12
_GRAPH_FIELDS = (
    "num_nodes", "peers_per_step", "num_rounds", "is_regular", "is_dynamic", "is_bipartite",
)  # fmt: skip
_FIELDS = (
    "doubly_stochastic", "weights_move", "weight_range", "second_eigenvalue", "spectral_gap",
    "spectral_gap_per_round", "tolerance", "mixes", "rounds_to_tolerance", "messages_mean",
    "messages_max", "permutes_mean", "permutes_max", "model_bytes", "bytes_mean", "bytes_max",
)  # fmt: skip


def graph_facts(analysis: GraphAnalysis) -> dict[str, Any]:
    """Return one value per name; `doubly_stochastic` means in all rounds."""
    graph = analysis.graph
    facts = {"graph": graph.name} | {name: getattr(graph, name) for name in _GRAPH_FIELDS}
    facts |= {name: getattr(analysis, name) for name in _FIELDS}
    return facts | {"doubly_stochastic": all(analysis.doubly_stochastic)}


def error_table(analysis: GraphAnalysis) -> dict[int, float]:
    """Return consensus errors after 0, 1, 2, 4, ... rounds, until one is within the tolerance."""
    last = analysis.rounds_to_tolerance
    counts = {0} | {2**k for k in range(64) if 2**k <= (FOREVER if last is None else last)}
    if last is not None:
        counts.add(last)
    return {count: analysis.error(count) for count in sorted(counts)}


def inspect_graph(config: InspectGraphConfig) -> int:
    """Print the analysis of a graph, and return the exit code.

    Raises:
      CommandError: the library refuses the graph or the mixing.
    """
    with usage_errors(num_nodes="nodes", table="phone_book"):
        analysis = config.analyse()
    if config.as_json:
        print(json.dumps(_as_json(analysis, config), indent=2))
        return 0
    console = Console()
    title = f"{analysis.graph.name}, {config.mixing} mixing"
    console.print(facts_table(analysis.summary(), title=title))
    if analysis.graph.num_nodes > 1:
        console.print(_phone_book(analysis.graph))
        console.print(_rounds(analysis))
        console.print(_errors(analysis))
        console.print(
            "consensus error: largest distance of all nodes from the mean, 1 at the start"
        )
    if config.matrices:
        _print_matrices(analysis)
    return 0


def _as_json(analysis: GraphAnalysis, config: InspectGraphConfig) -> dict[str, Any]:
    graph = analysis.graph
    facts = graph_facts(analysis) | {
        "mixing": config.mixing,
        "phone_book": graph.phone_book,
        "errors": [{"rounds": t, "error": e} for t, e in error_table(analysis).items()],
        "rounds": [
            {
                "out_peers": graph.out_peers(step),
                "doubly_stochastic": analysis.doubly_stochastic[step],
                "permutes": analysis.permutes[step],
            }
            for step in range(graph.num_rounds)
        ],
    }
    if config.matrices:
        for step, facts_of_round in enumerate(facts["rounds"]):
            facts_of_round["matrix"] = analysis.matrix(step).tolist()
        facts["product"] = analysis.product.tolist()
    return facts


def _phone_book(graph: Graph) -> Table:
    what = "sends to, in turn" if graph.is_dynamic else "sends to"
    table = Table(Column("node", justify="right"), what, title="Phone book")
    book = graph.phone_book if graph.is_dynamic else graph.out_peers(0)
    return _with_rows(table, len(book), "nodes", lambda node: [_some(book[node])])


def _rounds(analysis: GraphAnalysis) -> Table:
    table = Table(
        *(Column("round", justify="right"), "node 0 sends to", "doubly stochastic"),
        Column("collective permutes", justify="right"),
        title="Rounds of a rotation",
    )

    def row(step: int) -> list[str]:
        is_doubly = "yes" if analysis.doubly_stochastic[step] else "no"
        return [_some(analysis.graph.out_peers(step)[0]), is_doubly, str(analysis.permutes[step])]

    return _with_rows(table, analysis.graph.num_rounds, "rounds", row)


def _with_rows(table: Table, count: int, what: str, row: Callable[[int], list[str]]) -> Table:
    """Add numbered rows to a table; a last row counts those that are left out."""
    for number in range(min(count, _MOST_ROWS)):
        table.add_row(str(number), *row(number))
    if count > _MOST_ROWS:
        table.add_row("...", f"{count - _MOST_ROWS} more {what}")
    return table


def _errors(analysis: GraphAnalysis) -> Table:
    rows = ((str(rounds), f"{error:.3g}") for rounds, error in error_table(analysis).items())
    return numbers_table("after rounds", ["consensus error"], rows, title="Agreement")


def _print_matrices(analysis: GraphAnalysis) -> None:
    # Plain text, so that users can copy it; lines with hundreds of numbers must not be wrapped.
    with np.printoptions(precision=4, suppress=True, linewidth=10**9, threshold=10**9):
        for step in range(analysis.graph.num_rounds):
            print(f"\nP[destination, source] of round {step}\n{analysis.matrix(step)}")
        print(f"\nproduct over a rotation\n{analysis.product}")


def _some(peers: Sequence[int]) -> str:
    text = ", ".join(map(str, peers[:_MOST_PEERS]))
    return text if len(peers) <= _MOST_PEERS else f"{text}, ... ({len(peers)} in all)"
