"""What the wrapper refuses before anything is exchanged: argument and value are named."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from slowmo_alone import build

from jaxslowmo import topology
from support.refusals import Refusal, each
from torch_compat.slowmo._places import Places


def starving(graph, step):
    """Node 3 gives all it has and gets next to nothing."""
    matrix = np.diag([0.5, 0.5, 1.0, 0.0])
    matrix[1, 0] = matrix[2, 1] = 0.5
    matrix[3, 2], matrix[0, 3] = 1e-40, 1.0
    return matrix


LOOP = [[SimpleNamespace(dest=dest)] for dest in (1, 1, 3, 0)]  # as FairScale's GraphManager has it
CIRCLE = topology.from_phone_book([[1], [2], [3], [0]])
UNEVEN = topology.self_weighted([0.3, 0.5, 0.6, 0.4])
BAD = {
    "slowmo_frequency": 0,
    "localsgd_frequency": 2.5,
    "slowmo_momentum": 1.0,
    "nprocs_per_node": 0,
    "overlap": True,
    "broadcast_buffers": "mean",
    "module": torch.nn.ReLU(),
}
NO_AVERAGE = {"slowmo_base_algorithm": "sgp", "slowmo_momentum": 0.0}
GRAPHS = {
    "of another size": ({"graph": topology.ring(8)}, "`graph`", "ring(8)"),
    "of an unknown name": ({"graph": "spiral"}, "graph", "'spiral'"),
    "with a loop": ({"graph": SimpleNamespace(phone_book=LOOP)}, "node 1", ""),
    "mixed to more": ({"mixing": lambda graph, step: np.ones((4, 4))}, "column", "1"),
    "mixed unevenly": ({"mixing": UNEVEN, "push_sum": False}, "`push_sum`", False),
    "that starves a node": ({"graph": CIRCLE, "mixing": starving}, "weights", "1e-40"),
}
HALF = torch.nn.Linear(3, 2).half()  # of 6 and 2 elements
MASTERS = {
    "too short": (torch.zeros(7), "got 7 in 1"),
    "of another size": ([torch.zeros(6), torch.zeros(3)], "got 9 in 2"),
    "in another precision": ([torch.zeros(6), torch.zeros(2).double()], "torch.float64 at 1"),
}


def performed(masters) -> None:
    build(module=HALF).perform_slowmo(torch.optim.SGD(HALF.parameters()), fp32_params=masters)


def joined(by_all: bool, **options) -> None:
    build(**options).join(divide_by_initial_world_size=by_all).__enter__()


def with_anchor(net):
    """A state dict of slow momentum, of rank 1 of 4."""
    return net.state_dict() | {
        "slowmo.anchor": torch.arange(2.0),
        "slowmo.velocity": torch.ones(2),
        **{f"slowmo.{k}": torch.tensor([0.1, 0.1]).double() for k in ("rates", "made_at", "since")},
        "slowmo.names": torch.tensor([*b"weight\nbias"], dtype=torch.uint8),
    }


def loaded(state, **options) -> None:
    build(**options).load_state_dict(state)


def with_weight():
    """A state dict of a push-sum weight, of rank 1 of 4."""
    net = build(**NO_AVERAGE, mixing=UNEVEN)
    net.ps_weight = torch.tensor([1.25])
    return net.state_dict()


def renamed(state):
    text = bytes(state["slowmo.names"].tolist()).replace(b"bias", b"axis")
    return state | {"slowmo.names": torch.tensor([*text], dtype=torch.uint8)}


def performed_by(groups, **options) -> None:
    net = build(world=1, rank=0, module=torch.nn.LSTM(2, 2))
    named = dict(net.module.named_parameters())
    optimizers = [torch.optim.SGD([named[f"{n}_l0"] for n in names]) for names in groups]
    net.perform_slowmo(optimizers, **options)


WEIGHTS, BIASES = ["weight_ih", "weight_hh"], ["bias_ih", "bias_hh"]
# Arguments of DistributedDataParallel that cannot be followed.
OF_DDP = {
    "process_group": object(),
    "delay_all_reduce_named_params": [],
}


ROWS = {
    **{f"{k} of DDP": Refusal(partial(build, **{k: v}), f"`{k}`", v) for k, v in OF_DDP.items()},
    "a base algorithm": Refusal(
        lambda: build(slowmo_base_algorithm="adpsgd"), "SlowMoBaseAlgorithm", "adpsgd"
    ),
    "a lazy module": Refusal(
        lambda: build(module=torch.nn.Sequential(torch.nn.LazyLinear(2))), "`module`", "'0.weight'"
    ),
    "slow momentum of others": Refusal(
        lambda: loaded(renamed(with_anchor(build()))), "`state_dict`", "'axis'"
    ),
    **{k: Refusal(partial(build, **{k: value}), f"`{k}`", value) for k, value in BAD.items()},
    "nodes that split a host": Refusal(
        lambda: Places(0, 6, 2, tuple("aaabbb")), "`nprocs_per_node`", "3, 3"
    ),
    "no step that averages buffers": Refusal(
        lambda: build(broadcast_buffers="average", **NO_AVERAGE), "`broadcast_buffers`", "average"
    ),
    **{
        f"a graph {name}": Refusal(partial(build, slowmo_base_algorithm="sgp", **options), *said)
        for name, (options, *said) in GRAPHS.items()
    },
    **{
        f"masters {name}": Refusal(partial(performed, given), "`fp32_params`", said)
        for name, (given, said) in MASTERS.items()
    },
    "parameters left out": Refusal(
        lambda: performed_by([WEIGHTS]), "`optimizer`", "2 are missing, such as 'bias_"
    ),
    "one parameter twice": Refusal(
        lambda: performed_by([WEIGHTS, BIASES + WEIGHTS[:1]]), "`optimizer`", "'weight_ih_l0'"
    ),
    "join over torch_xla": Refusal(lambda: joined(True), "join(", "torch_xla"),
    "join with SGP": Refusal(lambda: joined(False, slowmo_base_algorithm="sgp"), "join(", "SGP"),
    "a state of another rank": Refusal(
        lambda: loaded(with_anchor(build()), rank=2), "`state_dict`", "rank 1 of 4"
    ),
    "a state that is kept otherwise": Refusal(
        lambda: loaded(with_anchor(build()), slowmo_memory_efficient=False),
        *("`slowmo_memory_efficient`", False),
    ),
    "a weight of another rank": Refusal(
        lambda: loaded(with_weight(), rank=0, **NO_AVERAGE, mixing=UNEVEN),
        *("`state_dict`", "rank 1 of 4"),
    ),
    "a weight without a graph": Refusal(
        lambda: loaded(with_weight(), **NO_AVERAGE), "`state_dict`", 1.25
    ),
}


@each(ROWS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_refused(refusal):
    refusal.check()
