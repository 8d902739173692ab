"""Nodes of processes, on hosts that count their processes in whatever order."""

import pytest

from torch_compat.slowmo._places import Places


def all_places(size: int, hosts: str | None = None) -> list[Places]:
    return [Places(rank, 6, size, None if hosts is None else tuple(hosts)) for rank in range(6)]


def test_two_nodes_of_three():
    places = all_places(3)
    assert [place.node for place in places] == [0, 0, 0, 1, 1, 1]
    assert [place.rank for place in places if place.is_master] == [0, 3]
    assert places[4].num_nodes == 2
    assert places[4].node_groups == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("size", "hosts", "groups"),
    [
        (3, "aaabbb", [[0, 1, 2], [3, 4, 5]]),
        (3, "ababab", [[0, 2, 4], [1, 3, 5]]),
        (3, "bababa", [[0, 2, 4], [1, 3, 5]]),
        (2, "aabbbb", [[0, 1], [2, 3], [4, 5]]),
        (2, "abbabb", [[0, 3], [1, 2], [4, 5]]),
        (2, "abcabc", [[0, 3], [1, 4], [2, 5]]),
        (1, "ababab", [[0], [2], [4], [1], [3], [5]]),
        # Nodes of several hosts.
        (2, "abcdef", [[0, 1], [2, 3], [4, 5]]),
        (6, "aabbcc", [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_processes_of_a_node_share_a_host(size, hosts, groups):
    places = all_places(size, hosts)
    assert places[0].node_groups == groups
    assert [p.node for p in places] == [
        next(k for k, ranks in enumerate(groups) if rank in ranks) for rank in range(6)
    ]
    assert places[0].masters == [ranks[0] for ranks in groups]
    assert [p.rank for p in places if p.is_master] == sorted(places[0].masters)


@pytest.mark.parametrize(("size", "hosts"), [(2, "aaabbb"), (3, "aabbcc"), (3, "aaaabb")])
def test_a_host_is_not_split_over_nodes(size, hosts):
    with pytest.raises(ValueError, match=r"`nprocs_per_node` must divide .* every host"):
        all_places(size, hosts)


def test_a_node_size_that_does_not_divide():
    with pytest.raises(ValueError, match=r"`nprocs_per_node` must divide .* 6, got 4"):
        Places(0, 6, 4)
