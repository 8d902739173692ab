"""The graphs equal those recorded from FairScale, in phone books and in every exchange."""

import json
from itertools import chain
from pathlib import Path

import pytest

from topology.graphs import FAIRSCALE

TABLES = json.loads((Path(__file__).parents[1] / "golden" / "graph_tables.json").read_text())


def cases(table: str) -> list[dict]:
    return [
        {"name": name, "size": int(size), "peers": int(peers), **recorded}
        for name, sizes in TABLES[table].items()
        for size, counts in sizes.items()
        for peers, recorded in counts.items()
    ]


def cannot_run(case: dict) -> bool:
    """Process groups refuse self-loops, and a missing peer stops the thread that gossips."""
    return case["has_self_loop"] or None in chain(*case["out_peers"])


def graph_of(case: dict):
    return FAIRSCALE[case["name"]](case["size"], peers_per_step=case["peers"])


def compare(case: dict, per_process: int = 1) -> int:
    """Number of exchanges that were compared; out-peers are recorded as processes."""

    def nodes(table: list) -> tuple:
        assert all(rank % per_process == 0 for row in table for rank in row)
        return tuple(tuple(rank // per_process for rank in row) for row in table)

    graph = graph_of(case)
    assert graph.phone_book == nodes(case["phone_book"])
    for key in ("is_regular", "is_bipartite", "is_dynamic"):
        assert getattr(graph, key) is case[key], key
    # The static graph was recorded as if it rotated, which no run does.
    used = len(case["out_peers"]) if graph.is_dynamic else 1
    for step in range(used):
        assert graph.out_peers(step) == nodes(case["out_peers"][step]), step
        assert graph.in_peers(step) == tuple(map(tuple, case["in_peers"][step])), step
        assert len(graph.permutations(step)) == case["peers"]
    return used


@pytest.mark.parametrize("name", FAIRSCALE)
def test_equal_to_the_original(name):
    mine = [case for case in cases("graphs") if case["name"] == name]
    running = [case for case in mine if not cannot_run(case)]
    assert (len(mine), len(mine) - len(running)) == (
        12,
        4 if "Bipartite" in name else 2 if "NPeer" in name else 0,
    )
    for case in running:
        # Two rotations through the phone book and one more, as far as there is a rotation.
        rotations = 2 * len(case["phone_book"][0]) + 1 if case["is_dynamic"] else 1
        assert compare(case) == rotations
    for case in mine:
        if cannot_run(case):
            with pytest.raises(ValueError, match="num_nodes"):
                graph_of(case)


def test_nodes_of_two_processes_form_the_same_graph():
    recorded = cases("graphs_nprocs_per_node_2")
    assert len(recorded) == 12
    for case in recorded:
        assert compare(case, per_process=2) >= 1
