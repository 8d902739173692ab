"""Parameters that are replaced or loaded in the middle, and frozen ones that forward() writes."""

import copy
import warnings

import numpy as np
import slowmo_here as here
import torch
from slowmo_models import take_step, values
from slowmo_spawned import spawned

from jaxslowmo import topology
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

RATE, MOMENTUM, EVERY = 0.1, 0.5, 2


class Headed(torch.nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = torch.nn.Parameter(torch.ones(3))
        self.head = torch.nn.Parameter(torch.full((classes,), 2.0))

    def forward(self, rank: int) -> torch.Tensor:
        """Constant gradients: 1 + rank for each element."""
        return (1 + rank) * (self.body.sum() + self.head.sum())


def replaced(classes: int, sharded: bool):
    """Train with one head, and then with another of so many classes, under the same name."""
    options = {"slowmo_memory_efficient": sharded, "localsgd_frequency": 1}
    net = SlowMo(Headed(4), 1, slowmo_frequency=EVERY, **options)

    def train(steps: int) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
        for _ in range(steps):
            take_step(net, optimizer, net(here.rank()))

    train(EVERY)
    net.module.head = torch.nn.Parameter(torch.full((classes,), 7.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(2 * EVERY)
    said = [str(w.message) for w in caught if "'head'" in str(w.message)]
    return values(net.module), said


def slow_steps(value: float, number: int) -> float:
    """Algorithm 1 with constant gradients, 1 and 2 in two processes."""
    velocity = 0.0
    for _ in range(number):
        velocity = MOMENTUM * velocity + EVERY * 1.5
        value -= RATE * velocity
    return value


# Numbers of classes: fewer, as many, more; whether slow momentum is sharded.
CASES = [(2, True), (4, False), (9, True), (9, False)]


def replaced_in_all_ways():
    return [replaced(*case) for case in CASES]


def test_a_new_parameter_under_an_old_name_starts_anew():
    for results in spawned(2, replaced_in_all_ways):
        for (classes, _), (state, said) in zip(CASES, results, strict=True):
            np.testing.assert_allclose(state["head"], np.full(classes, slow_steps(7, 2)), rtol=1e-6)
            np.testing.assert_allclose(state["body"], np.full(3, slow_steps(1, 3)), rtol=1e-6)
            assert len(said) == 1


def loaded(sharded: bool, anchors_again: bool):
    net = SlowMo(
        Headed(4), 1, slowmo_memory_efficient=sharded, slowmo_frequency=2, localsgd_frequency=1
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    best = {name: torch.full_like(p, 5.0) for name, p in net.module.state_dict().items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net.module.load_state_dict(net.module.state_dict())  # before training
        for _ in range(3):
            take_step(net, optimizer, net(here.rank()))
        net.load_state_dict(net.state_dict())  # resumes
        copy.deepcopy(net.module).load_state_dict(best)  # of another module
        take_step(net, optimizer, net(here.rank()))
        early = len(caught)
        net.module.load_state_dict(best)
        if anchors_again:
            net._init_global_momentum_buffers(optimizer)
        for _ in range(4):
            take_step(net, optimizer, net(here.rank()))
    return values(net.module), early, [str(w.message) for w in caught]


def loaded_in_all_ways():
    return [loaded(sharded, again) for sharded in (True, False) for again in (True, False)]


def test_loading_in_the_middle_warns_unless_slow_momentum_is_anchored_again():
    for results in spawned(2, loaded_in_all_ways):
        assert [early for _, early, _ in results] == [0] * 4
        for (state, _, said), (_, _, warned) in (results[:2], results[2:]):
            assert said == []
            np.testing.assert_allclose(state["body"], 5.0, atol=1e-4)
            assert len(warned) == 1
            assert "_init_global_momentum_buffers(optimizer)" in warned[0]


class Target(torch.nn.Module):
    """A frozen parameter that follows the trained one, as in BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.online = torch.nn.Parameter(torch.zeros(3))
        self.target = torch.nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: float) -> torch.Tensor:
        with torch.no_grad():
            self.target.lerp_(torch.full((3,), x), 0.5)
        return ((self.online - self.target) ** 2).sum()


def followed(buffers, for_resuming: bool):
    net = SlowMo(Target(), 1, buffers, slowmo_frequency=2)
    optimizer = torch.optim.SGD([net.module.online], lr=0.1)
    for _ in range(4):
        take_step(net, optimizer, net(float(here.rank())))
    state = net.consolidated_state_dict(for_resuming=for_resuming)
    return {name: value.numpy() for name, value in state.items()}, values(net.module)["target"]


FOLLOWED = [(True, False), ("average", True), (False, False)]


def followed_in_all_ways():
    return [followed(*case) for case in FOLLOWED]


def test_frozen_parameters_that_forward_writes_are_one_state_for_all():
    for case, *results in zip(FOLLOWED, *spawned(2, followed_in_all_ways), strict=True):
        (one, own), (other, others) = results
        assert abs(own - others).min() > 0.9
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)
        target = one["module.target" if case[1] else "target"]
        wanted = (own + others) / 2 if case[0] == "average" else own
        np.testing.assert_array_equal(target, wanted)


def pushed(default: torch.dtype):
    torch.set_default_dtype(default)
    module = torch.nn.Linear(3, 3, bias=False, dtype=torch.float32)
    torch.nn.init.constant_(module.weight, 1.0 + here.rank())
    options = {"slowmo_base_algorithm": "sgp", "mixing": topology.self_weighted([0.3, 0.6])}
    net = SlowMo(module, 1, **options, slowmo_momentum=0.0, init_sync=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for _ in range(3):
        take_step(net, optimizer, net(torch.ones(1, 3, dtype=torch.float32)).sum())
    assert net.ps_weight.dtype == torch.float32
    assert net.consolidated_state_dict(for_resuming=True)["ps_weight"].dtype == torch.float32
    return net.ps_weight.item(), values(net.module)["weight"]


def pushed_by_default_and_in_half():
    return pushed(torch.float32), pushed(torch.bfloat16)


def test_the_push_sum_weight_is_float32_whatever_the_default():
    for (weight, params), (of_half, others) in spawned(2, pushed_by_default_and_in_half):
        assert weight == of_half
        np.testing.assert_array_equal(params, others)
