"""What the constructor sets, and warns of; it needs no device."""

import inspect
import warnings
from types import SimpleNamespace

import pytest
from slowmo_alone import build

from jaxslowmo import topology
from torch_compat.slowmo import SlowMoBaseAlgorithm
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo
from torch_compat.slowmo._gossip import plan_gossip
from torch_compat.slowmo._places import Places

FAIRSCALES = (
    "module nprocs_per_node broadcast_buffers=True "
    "slowmo_base_algorithm=SlowMoBaseAlgorithm.LOCALSGD slowmo_momentum=0.5 "
    "slowmo_memory_efficient=True slowmo_frequency=48 slowmo_lr=1.0 slowmo_num_shards=32 "
    "localsgd_frequency=3 graph=None mixing=None push_sum=True overlap=False synch_freq=0 "
    "use_streams=True slowmo_sgp_average_params=False verbose=False profile_mode=False "
    "process_rank=None process_world_size=None global_group=None master_group=None "
    "local_node_group=None comm_device=None"
)
OF_DDP = "init_sync=True"


def test_arguments_order_and_defaults_are_fairscales():
    *parameters, of_ddp = inspect.signature(SlowMo).parameters.values()
    assert of_ddp.kind == of_ddp.VAR_KEYWORD
    written = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert written == f"{FAIRSCALES} {OF_DDP}".split()
    assert [p.name for p in parameters if p.kind == p.KEYWORD_ONLY] == ["init_sync"]


def test_attributes_that_fairscales_users_read():
    net = build(world=8, rank=5, nprocs_per_node=2, slowmo_lr=0.7, slowmo_momentum=0.2)
    assert (net.process_rank, net.process_world_size, net.nprocs_per_node) == (5, 8, 2)
    assert (net.logical_rank, net.logical_world_size) == (2, 4)
    assert (net.slowmo_lr, net.slowmo_momentum, net.slowmo_frequency) == (0.7, 0.2, 48)
    assert (net.localsgd_frequency, net.num_updates, net.ps_weight.tolist()) == (3, 0, [1.0])
    assert (net.old_params, net.global_momentum_buffer) == (None, None)
    for value in (SlowMoBaseAlgorithm.SGP, "sgp"):
        net = build(slowmo_base_algorithm=value)
        assert (net.sgp, net.localsgd) == (True, False)
    assert not build(slowmo_momentum=0.0, slowmo_lr=1.0).slowmo
    assert build(slowmo_momentum=0.0, slowmo_lr=0.9).slowmo


ARGUMENTS = {"synch_freq": 2, "use_streams": False, "profile_mode": True, "comm_device": "cpu"}
# What is worth a warning, and what each of the warnings names.
WARNED = {
    "arguments without effect": (
        {**ARGUMENTS, "global_group": object(), "slowmo_num_shards": 2},
        [[*ARGUMENTS, "`global_group`", "`slowmo_num_shards`", "torch_xla"]],
    ),
    "one node": (
        {"nprocs_per_node": 4, "slowmo_base_algorithm": "sgp"},
        [["`nprocs_per_node`=4", "SGP"]],
    ),
    "out of step": ({"slowmo_frequency": 4}, [["`slowmo_frequency`=4", "`localsgd_frequency`=3"]]),
    "one process": ({"world": 1, "rank": 0, "slowmo_num_shards": 1}, [["one process"]]),
    "nothing": ({}, []),
}


@pytest.mark.parametrize("case", WARNED)
def test_warnings(case):
    options, expected = WARNED[case]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = build(**options)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == len(expected), messages
    for message, words in zip(messages, expected, strict=True):
        assert all(word in message for word in words), message
        assert "local_node_group" not in message
        assert caught[0].filename.endswith("slowmo_alone.py"), "it is told where the caller stands"
    if "node" in case:
        assert (net.sgp, net.localsgd) == (False, False)


# Processes per node, the hosts of six processes, the ranks of each node.
NODES = [
    (3, None, [[0, 1, 2], [3, 4, 5]]),
    (3, "ababab", [[0, 2, 4], [1, 3, 5]]),
    (2, "abbabb", [[0, 3], [1, 2], [4, 5]]),
    (2, "abcdef", [[0, 1], [2, 3], [4, 5]]),  # nodes of several hosts
]


@pytest.mark.parametrize(("size", "hosts", "groups"), NODES)
def test_processes_of_a_node_share_a_host(size, hosts, groups):
    places = [Places(rank, 6, size, hosts and tuple(hosts)) for rank in range(6)]
    assert places[0].node_groups == groups
    assert places[0].num_nodes == len(groups)
    for place in places:
        assert place.rank in groups[place.node]
        assert place.is_master == (place.rank == groups[place.node][0])


def test_fairscales_graph_manager_counts_masters():
    """The irregular table of the recording, with two processes in each node."""
    table = [[1, 3], [0, 2], [0, 3], [1, 0]]

    book = [[SimpleNamespace(dest=2 * dest) for dest in row] for row in table]
    manager = SimpleNamespace(phone_book=book, peers_per_itr=1, is_dynamic_graph=lambda: True)
    uniform = SimpleNamespace(is_uniform=lambda: True)
    plan = plan_gossip(manager, uniform, 4, 2, push_sum=True)
    expected = topology.exchange_rounds(topology.from_phone_book(table))
    assert [r.permutations for r in plan.rounds] == [r.permutations for r in expected]
    assert plan.weight_moves
