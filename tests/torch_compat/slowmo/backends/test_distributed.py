"""Groups, nodes and devices of `torch.distributed`."""

import pickle

import numpy as np
import pytest
import slowmo_here as here
import torch
import torch.distributed as dist
from slowmo_models import Perceptron, train_step, values
from slowmo_spawned import spawned

from torch_compat.slowmo import SlowMoDistributedDataParallel
from torch_compat.slowmo.backends._distributed import DistributedBackend
from torch_compat.slowmo.backends._waiting import backend_on

WIDTH = 8


def trained(**options):
    net = SlowMoDistributedDataParallel(
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


@pytest.mark.parametrize("nprocs_per_node", [1, 2])
def test_two_runs_beside_each_other(nprocs_per_node):
    results = spawned(4, in_a_group, [1, 3], nprocs_per_node)
    assert [result[:2] for result in results] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    weights = [result[2] for result in results]
    assert np.array_equal(weights[1], weights[3])
    assert np.array_equal(weights[0], weights[2])
    assert not np.array_equal(weights[0], weights[1])


def by_wire(comm_device):
    return values(trained(comm_device=comm_device).module)["w1"]


def test_where_tensors_are_exchanged():
    plain, named = (spawned(2, by_wire, device) for device in (None, "cpu"))
    assert np.array_equal(plain[0], named[1])


def in_nodes(given: bool):
    node = [[0, 1], [2, 3]][here.rank() // 2]
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])] if given else [None, None]
    net = trained(nprocs_per_node=2, local_node_group=groups[here.rank() // 2])
    return node, values(net.module)["w1"]


def test_the_group_of_a_node_may_be_given():
    made, given = (spawned(4, in_nodes, how) for how in (False, True))
    for (_, ours), (_, theirs) in zip(made, given, strict=True):
        assert np.array_equal(ours, theirs)


def refusals():
    found = []
    alone = [dist.new_group([rank]) for rank in (0, 1)]
    for options in (
        {"global_group": alone[1]},
        {"nprocs_per_node": 2, "local_node_group": alone[here.rank()]},
    ):
        try:
            SlowMoDistributedDataParallel(Perceptron(2, 2), **{"nprocs_per_node": 1, **options})
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def test_groups_that_do_not_fit():
    (alone, _), (_, node) = results = spawned(2, refusals)
    assert [bool(found[0]) for found in results] == [True, False]
    assert alone == "`global_group` must contain this process."
    assert "`local_node_group` must hold the 2 processes of this node, ranks [0, 1]" in node
    assert node.endswith("got ranks [1].")


def arguments_without_effect():
    with pytest.warns(UserWarning, match="without effect over torch.distributed") as caught:
        net = SlowMoDistributedDataParallel(
            Perceptron(2, 2), 1, use_streams=False, master_group=object(), comm_device="cpu"
        )
    assert net._backend.name == "torch.distributed"
    return [str(warning.message) for warning in caught]


def test_arguments_without_effect_are_named():
    for (message,) in spawned(2, arguments_without_effect):
        assert "`use_streams`, `master_group` without effect" in message
        assert "comm_device" not in message


def test_a_process_group_must_be_there():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) first"):
        DistributedBackend()


def exchanged():
    """Every collective on a vector of known numbers."""
    backend, rank = DistributedBackend(), here.rank()
    value = torch.arange(6.0) + 10 * rank
    sums = backend.all_reduce([value[:2], value[2:].reshape(2, 2)])
    assert torch.equal(value, torch.arange(6.0) + 10 * rank), "what is sent stays"
    return (
        [part.tolist() for part in sums],
        backend.reduce_scatter(value).tolist(),
        backend.all_gather(value[:1]).tolist(),
        backend.permute(value[:1], [(0, 1), (1, 2)]).tolist(),
        backend.permute(value[:1], [(0, 2), (2, 1), (1, 0)]).tolist(),
        backend.all_reduce([torch.tensor([rank == 1, True]), torch.tensor([False])])[0].tolist(),
    )


def test_collectives():
    for rank, result in enumerate(spawned(3, exchanged)):
        sums, part, gathered, chain, circle, flags = result
        assert sums == [[30.0, 33.0], [[36.0, 39.0], [42.0, 45.0]]]
        assert part == [30.0 + 6 * rank, 33.0 + 6 * rank]
        assert gathered == [0.0, 10.0, 20.0]
        assert chain == [[0.0], [0.0], [10.0]][rank]
        assert circle == [[10.0], [20.0], [0.0]][rank]
        assert flags == [True, True]


def of_a_type_that_gloo_lacks():
    backend = DistributedBackend()
    with pytest.raises(RuntimeError, match="Invalid scalar type") as caught:
        backend.all_reduce([torch.ones(2, dtype=torch.float8_e4m3fn)])
    return type(caught.value) is RuntimeError


def test_what_gloo_refuses_is_told_as_it_is():
    assert spawned(2, of_a_type_that_gloo_lacks) == [True, True]


class Rows(torch.nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(6, 3, sparse=sparse)
        torch.nn.init.ones_(self.rows.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.rows(ids) * (1 + here.rank())).sum()


def of_rows(sparse: bool):
    net = SlowMoDistributedDataParallel(Rows(sparse), nprocs_per_node=2)
    net(torch.tensor([here.rank(), 4])).backward()
    gradient = net.module.rows.weight.grad
    return gradient.is_sparse, gradient.to_dense().numpy()


def test_sparse_gradients_stay_sparse_in_nodes_of_several():
    for (is_sparse, ours), (_, dense) in zip(
        spawned(2, of_rows, True), spawned(2, of_rows, False), strict=True
    ):
        assert is_sparse
        assert np.array_equal(ours, dense)
        assert dense[:, 0].tolist() == [0.5, 1.0, 0, 0, 1.5, 0]


def not_pickled():
    with pytest.raises(TypeError, match=r"save its state_dict\(\) in every process"):
        pickle.dumps(trained())


def test_what_cannot_be_pickled():
    spawned(2, not_pickled)


def by_two_wrappers(address: str):
    """Two wrappers of one group, and a group that is made anew."""
    rank, world = here.rank(), here.world()
    found = [values(net.module)["w1"] for net in (trained(), trained())]
    dist.destroy_process_group()
    # Without a name, as init_process_group() has it: what fits the machine.
    dist.init_process_group(init_method=f"file://{address}", rank=rank, world_size=world)
    net = trained()
    assert backend_on(dist.group.WORLD, torch.device("cpu")) == "gloo"
    return [*found, values(net.module)["w1"]]


def test_wrappers_and_groups_after_each_other(tmp_path):
    first, second = spawned(2, by_two_wrappers, tmp_path / "again")
    for ours, theirs in zip(first, second, strict=True):
        assert np.array_equal(ours, first[0])
        assert np.array_equal(theirs, second[0])
