"""What a replica remembers, and hands over."""

import pytest
import torch
from slowmo_alone import Alone

from torch_compat.slowmo._gossip import plan_gossip
from torch_compat.slowmo._places import Places
from torch_compat.slowmo._replica import Replica, State
from torch_compat.slowmo.slow_momentum import SlowMomentum


def replica(is_sgp: bool = True, nprocs_per_node: int = 1) -> Replica:
    places = Places(1, 4, nprocs_per_node)
    plan = plan_gossip("ring", None, 4 // nprocs_per_node, nprocs_per_node, push_sum=True)
    options = {"is_sharded": True, "is_bounded": True, "averages_buffers": False}
    return Replica(places, Alone(1, 4), plan, is_sgp=is_sgp, **options)


def test_a_new_one_remembers_nothing():
    state = replica().state()
    assert (state.num_updates, state.exchanges, state.is_numerator) == (0, 0, False)
    assert (state.momentum, state.initial) == (None, None)
    assert state.weight.tolist() == [1.0]


def some_state() -> State:
    own = replica()
    momentum = SlowMomentum(own.slow.span((8,)), torch.ones(2))
    return State(7, 3, momentum, None, torch.tensor([0.5]), True)


def test_what_one_remembers_another_takes_over():
    state, other = some_state(), replica()
    other.take_over(state)
    assert other.state() == state


def test_weights_are_push_sums_alone():
    other = replica(is_sgp=False)
    other.take_over(some_state())
    assert other.num_updates == 7
    assert other.push_sum.weight.tolist() == [1.0]
    assert not other.push_sum.is_numerator


@pytest.mark.parametrize("nprocs_per_node", [1, 2])
def test_a_backward_pass_matters_in_nodes_of_several(nprocs_per_node):
    own = replica(nprocs_per_node=nprocs_per_node)
    assert own.waits_for_backward == (nprocs_per_node > 1)
