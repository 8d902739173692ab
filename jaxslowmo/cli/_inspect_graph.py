"""`jaxslowmo inspect graph`: the analysis of one graph, as tables or JSON."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from jaxslowmo.topology import GraphAnalysis

from ._errors import usage_errors
from ._output import facts_table, say, table_of
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
    graph = analysis.graph
    if config.as_json:
        print(json.dumps(_as_json(analysis, config), indent=2))
        return 0
    console = Console()
    console.print(facts_table(analysis.summary(), title=f"{graph.name}, {config.mixing} mixing"))
    if graph.num_nodes > 1:
        book = graph.phone_book if graph.is_dynamic else graph.out_peers(0)
        what = "sends to, in turn" if graph.is_dynamic else "sends to"
        rows = [{"node": str(node), what: _some(peers)} for node, peers in enumerate(book)]
        console.print(table_of(_first(rows, "nodes"), title="Phone book"))
        rows = [
            {
                "round": str(step),
                "node 0 sends to": _some(graph.out_peers(step)[0]),
                "doubly stochastic": "yes" if analysis.doubly_stochastic[step] else "no",
                "collective permutes": str(analysis.permutes[step]),
            }
            for step in range(graph.num_rounds)
        ]
        console.print(table_of(_first(rows, "rounds"), title="Rounds of a rotation"))
        errors = error_table(analysis).items()
        rows = [{"after rounds": str(t), "consensus error": f"{error:.3g}"} for t, error in errors]
        about = "consensus error: largest distance of all nodes from the mean, 1 at the start"
        console.print(table_of(rows, title="Agreement"))
        say(console, about)
    if config.matrices:
        # Plain text, so that users can copy it; lines with hundreds of numbers must not be wrapped.
        with np.printoptions(precision=4, suppress=True, linewidth=10**9, threshold=10**9):
            for step in range(graph.num_rounds):
                print(f"\nP[destination, source] of round {step}\n{analysis.matrix(step)}")
            print(f"\nproduct over a rotation\n{analysis.product}")
    return 0


def _as_json(analysis: GraphAnalysis, config: InspectGraphConfig) -> dict[str, Any]:
    graph = analysis.graph
    rounds = [
        {
            "out_peers": graph.out_peers(step),
            "doubly_stochastic": analysis.doubly_stochastic[step],
            "permutes": analysis.permutes[step],
        }
        | ({"matrix": analysis.matrix(step).tolist()} if config.matrices else {})
        for step in range(graph.num_rounds)
    ]
    errors = [{"rounds": t, "error": error} for t, error in error_table(analysis).items()]
    facts = {"mixing": config.mixing, "phone_book": graph.phone_book, "errors": errors}
    product = {"product": analysis.product.tolist()} if config.matrices else {}
    return graph_facts(analysis) | facts | {"rounds": rounds} | product


def _first(rows: list[dict[str, str]], what: str) -> list[dict[str, str]]:
    """Return the first rows, and one that counts those that are left out."""
    more = {"": "...", "more": f"{len(rows) - _MOST_ROWS} more {what}"}
    return rows if len(rows) <= _MOST_ROWS else [*rows[:_MOST_ROWS], more]


def _some(peers: Sequence[int]) -> str:
    text = ", ".join(map(str, peers[:_MOST_PEERS]))
    return text if len(peers) <= _MOST_PEERS else f"{text}, ... ({len(peers)} in all)"
