"""What is known about a graph, as JSON has it."""

from typing import Any

from jaxslowmo.topology import GraphAnalysis

FOREVER = 1024  # rounds to show of nodes that never agree
_FIELDS = (
    "doubly_stochastic", "weights_move", "weight_range", "second_eigenvalue", "spectral_gap",
    "spectral_gap_per_round", "tolerance", "mixes", "rounds_to_tolerance", "messages_mean",
    "messages_max", "permutes_mean", "permutes_max", "model_bytes", "bytes_mean", "bytes_max",
)  # fmt: skip


def graph_facts(analysis: GraphAnalysis) -> dict[str, Any]:
    """One value per name; `doubly_stochastic` of all rounds together."""
    graph = analysis.graph
    facts: dict[str, Any] = {
        "graph": graph.name,
        "num_nodes": graph.num_nodes,
        "peers_per_step": graph.peers_per_step,
        "num_rounds": graph.num_rounds,
        "is_regular": graph.is_regular,
        "is_dynamic": graph.is_dynamic,
        "is_bipartite": graph.is_bipartite,
    }
    facts |= {name: getattr(analysis, name) for name in _FIELDS}
    facts["doubly_stochastic"] = all(analysis.doubly_stochastic)
    return facts


def error_table(analysis: GraphAnalysis) -> dict[int, float]:
    """Consensus errors after 0, 1, 2, 4, ... rounds, up to the first one within the tolerance."""
    last = analysis.rounds_to_tolerance
    counts = {0} | {2**k for k in range(64) if 2**k <= (FOREVER if last is None else last)}
    if last is not None:
        counts.add(last)
    return {count: analysis.error(count) for count in sorted(counts)}
