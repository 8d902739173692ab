"""Graphs side by side: one table per quantity, graphs down and sizes across."""

import dataclasses
from collections.abc import Callable, Mapping

from jaxslowmo.topology import GraphAnalysis

from ._config import InspectGraphsConfig

# By graph and number of nodes; a string says why there is no such graph.
Analyses = Mapping[tuple[str, int], GraphAnalysis | str]

_NONE = "none"


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A table.

    Attributes:
      title: of the table, for a configuration.
      text: of a cell.
    """

    title: Callable[[InspectGraphsConfig], str]
    text: Callable[[GraphAnalysis], str]


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


QUANTITIES = (
    Quantity(lambda config: f"Rounds to a consensus error of {config.tolerance:g}", _rounds),
    Quantity(
        lambda config: "Messages that a node sends per round: mean (and the busiest node)",
        _messages,
    ),
    Quantity(
        lambda config: (
            f"Messages that the busiest node sends until an error of {config.tolerance:g}"
        ),
        _messages_to_tolerance,
    ),
    Quantity(lambda config: "Spectral gap per round", lambda a: f"{a.spectral_gap_per_round:.2g}"),
)


def cell(quantity: Quantity, found: GraphAnalysis | str) -> str:
    """What the table shows of a graph at a size."""
    return _NONE if isinstance(found, str) else quantity.text(found)


def reasons(analyses: Analyses) -> list[str]:
    """A line for each graph that does not exist at some size."""
    return [
        f"{graph} with {nodes} nodes: {_NONE}, since {found}"
        for (graph, nodes), found in analyses.items()
        if isinstance(found, str)
    ]


def markdown(config: InspectGraphsConfig, analyses: Analyses) -> str:
    """All tables, and why cells have no number."""
    parts = [f"Mixing: {config.mixing}. NAME:2 sends to 2 peers per step.\n"]
    for quantity in QUANTITIES:
        parts.append(f"**{quantity.title(config)}**\n")
        parts.append("\n".join(_rows(quantity, config, analyses)) + "\n")
    missing = reasons(analyses)
    if missing:
        parts.append("\n".join(f"- {line}" for line in missing) + "\n")
    return "\n".join(parts)


def _rows(quantity: Quantity, config: InspectGraphsConfig, analyses: Analyses) -> list[str]:
    lines = [
        f"| nodes | {' | '.join(map(str, config.nodes))} |",
        f"|---|{'---:|' * len(config.nodes)}",
    ]
    for graph in config.graphs:
        cells = [cell(quantity, analyses[graph, nodes]) for nodes in config.nodes]
        lines.append(f"| {graph} | {' | '.join(cells)} |")
    return lines
