"""Groups, nodes and devices of `torch.distributed`."""

import pickle

import numpy as np
import pytest
import slowmo_here as here
import torch
import torch.distributed as dist
from slowmo_models import Perceptron, train_step, values
from slowmo_spawned import spawned

from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo
from torch_compat.slowmo.backends._distributed import DistributedBackend

WIDTH = 8


def trained(**options):
    net = SlowMo(
        Perceptron(WIDTH, 6),
        **{"nprocs_per_node": 1, "slowmo_frequency": 4, "localsgd_frequency": 2, **options},
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for t in range(6):
        train_step(net, optimizer, t, WIDTH)
    return net


def in_a_group(ranks: list[int], nprocs_per_node: int):
    """A run of some of the processes, beside another of the rest."""
    rest = [rank for rank in range(here.world()) if rank not in ranks]
    groups = [dist.new_group(some) for some in (ranks, rest)]
    group = groups[0] if here.rank() in ranks else groups[1]
    net = trained(global_group=group, nprocs_per_node=nprocs_per_node)
    return net.process_rank, net.process_world_size, values(net.module)["w1"]


def in_nodes(**options):
    return values(trained(nprocs_per_node=2, **options).module)["w1"]


def in_groups():
    group = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][here.rank() // 2]
    return (
        [in_a_group([1, 3], size) for size in (1, 2)],
        [in_nodes(), in_nodes(local_node_group=group), in_nodes(comm_device="cpu")],
    )


def test_groups_of_runs_and_of_nodes():
    results = spawned(4, in_groups)
    for found in zip(*(beside for beside, _ in results), strict=True):
        assert [place for *place, _ in found] == [[0, 2], [0, 2], [1, 2], [1, 2]]
        weights = [weight for *_, weight in found]
        assert np.array_equal(weights[1], weights[3])
        assert np.array_equal(weights[0], weights[2])
        assert not np.array_equal(weights[0], weights[1])
    for _, (made, given, named) in results:
        assert np.array_equal(made, given)
        assert np.array_equal(made, named)


def message_of(**options) -> str:
    try:
        SlowMo(Perceptron(2, 2), **{"nprocs_per_node": 1, **options})
    except ValueError as error:
        return str(error)
    return ""


def arguments_that_do_not_fit():
    alone = [dist.new_group([rank]) for rank in (0, 1)]
    with pytest.warns(UserWarning, match="without effect over torch.distributed") as caught:
        SlowMo(Perceptron(2, 2), 1, use_streams=False, master_group=object(), comm_device="cpu")
    (warning,) = caught
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(trained())
    node = {"nprocs_per_node": 2, "local_node_group": alone[here.rank()]}
    return str(warning.message), message_of(global_group=alone[1]), message_of(**node)


def test_arguments_that_do_not_fit_are_named():
    for rank, (unused, alone, node) in enumerate(spawned(2, arguments_that_do_not_fit)):
        assert "`use_streams`, `master_group`" in unused
        assert "comm_device" not in unused
        assert ("`global_group`" in alone) == (rank == 0), "process 1 is in it"
        assert "`local_node_group` must hold the 2 processes of this node, ranks [0, 1]" in node
        assert f"got ranks [{rank}]" in node


# Pairs in both directions, a cycle, one edge alone, and nothing; a value of each is on one edge.
EDGES = [[(0, 1), (1, 0), (2, 3), (3, 2)], [(0, 2), (2, 1), (1, 3), (3, 0)], [(3, 1)], []]


def permuted():
    """Values of many kinds and sizes, of which sockets hold the smaller ones alone."""
    backend, found = DistributedBackend(), []
    for edges in EDGES:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for shape in ((), (0,), (3, 2), (1 << 20,)):
                value = torch.full(shape, 1.0 + here.rank(), dtype=dtype)
                new = backend.permute(value, edges)
                assert (new.shape, new.dtype) == (value.shape, dtype)
                assert torch.equal(value, torch.full(shape, 1.0 + here.rank(), dtype=dtype))
                found.append({*new.unique().tolist()})
    return found


def test_values_go_along_edges():
    for rank, found in enumerate(spawned(4, permuted)):
        for edges in EDGES:
            expected = {1.0 + source for source, target in edges if target == rank} or {0.0}
            ours, found = found[:12], found[12:]
            assert ours == [expected, set(), expected, expected] * 3
