"""The graphs equal those recorded from FairScale, in phone books and in every exchange."""

import json
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from topology.graphs import FAIRSCALE

TABLES = json.loads((Path(__file__).parents[1] / "golden" / "graph_tables.json").read_text())


def cases(table: str) -> dict[str, dict]:
    return {
        f"{name}-{size}-{peers}": {"name": name, "size": int(size), "peers": int(peers), **recorded}
        for name, sizes in TABLES[table].items()
        for size, counts in sizes.items()
        for peers, recorded in counts.items()
    }


ALL = cases("graphs")
# The original cannot run them: self-loops are refused by its process groups, and a missing peer
# stops the thread that gossips.
NOT_RUNNING = {
    key for key, c in ALL.items() if c["has_self_loop"] or None in chain(*c["out_peers"])
}
RUNNING = sorted(ALL.keys() - NOT_RUNNING)
TWO_PER_NODE = cases("graphs_nprocs_per_node_2")


def graph_of(case: dict):
    return FAIRSCALE[case["name"]](case["size"], peers_per_step=case["peers"])


def as_lists(peers) -> list:
    return [list(row) for row in peers]


def compare(case: dict, per_process: int = 1) -> int:
    """Number of exchanges that were compared; out-peers are recorded as processes."""

    def nodes(table: list) -> list:
        assert all(rank % per_process == 0 for row in table for rank in row)
        return [[rank // per_process for rank in row] for row in table]

    graph = graph_of(case)
    assert as_lists(graph.phone_book) == nodes(case["phone_book"])
    for key in ("is_regular", "is_bipartite", "is_dynamic"):
        assert getattr(graph, key) is case[key], key
    # The static graph was recorded as if it rotated, which no run does.
    used = len(case["out_peers"]) if graph.is_dynamic else 1
    for step in range(used):
        assert as_lists(graph.out_peers(step)) == nodes(case["out_peers"][step]), step
        assert as_lists(graph.in_peers(step)) == case["in_peers"][step], step
        assert len(graph.permutations(step)) == case["peers"]
    return used


def test_all_cases_are_here():
    assert len(ALL) == 6 * 6 * 2
    assert sorted(NOT_RUNNING) == [
        *(f"DynamicBipartiteExponentialGraph-{n}-{p}" for n in (3, 5) for p in (1, 2)),
        *(f"DynamicBipartiteLinearGraph-{n}-{p}" for n in (3, 5) for p in (1, 2)),
        "NPeerDynamicDirectedExponentialGraph-2-2",
        "NPeerDynamicDirectedExponentialGraph-6-2",
    ]
    assert len(TWO_PER_NODE) == 6 * 2 * 1
    assert Counter(case["has_duplicate_peers"] for case in ALL.values())[True] > 20


@pytest.mark.parametrize("key", RUNNING)
def test_equal_to_the_original(key):
    case = ALL[key]
    compared = compare(case)
    # Two rotations through the phone book and one more, as far as there is a rotation.
    assert compared == (2 * len(case["phone_book"][0]) + 1 if case["is_dynamic"] else 1)


@pytest.mark.parametrize("key", TWO_PER_NODE)
def test_nodes_of_two_processes_form_the_same_graph(key):
    assert compare(TWO_PER_NODE[key], per_process=2) >= 1


@pytest.mark.parametrize("key", sorted(NOT_RUNNING))
def test_what_the_original_cannot_run_is_refused(key):
    reason = "`num_nodes` must be even" if "Bipartite" in key else "would send to themselves"
    with pytest.raises(ValueError, match=reason):
        graph_of(ALL[key])
