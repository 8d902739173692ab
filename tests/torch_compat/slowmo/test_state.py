"""What a wrapper saves and loads: it continues with the same bits."""

import io
from pathlib import Path

import numpy as np
import slowmo_here as here
import torch
from slowmo_alone import build
from slowmo_models import Perceptron, train_step, values
from slowmo_spawned import spawned

from jaxslowmo import topology
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

WIDTH = 8
PUSH_SUM = {
    "slowmo_base_algorithm": "sgp",
    "mixing": topology.self_weighted([0.3, 0.6]),
    "slowmo_frequency": 3,
}
KINDS = {
    "sharded": {"slowmo_frequency": 4, "localsgd_frequency": 2},
    "whole": {"slowmo_frequency": 4, "localsgd_frequency": 2, "slowmo_memory_efficient": False},
    "push-sum sharded": PUSH_SUM,
    "averages only": {"slowmo_momentum": 0.0, "localsgd_frequency": 3},
}


class Outer(torch.nn.Module):
    """A module that has the wrapper inside."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.scale = torch.nn.Parameter(torch.ones(2))


def built(kind: str, momentum: float = 0.9):
    options = dict(KINDS[kind])
    if here.world() != 2:
        options.pop("mixing", None)
    module = Perceptron(WIDTH, 6)
    module.register_buffer("seen", torch.arange(3))
    net = SlowMo(module.to(here.device()), nprocs_per_node=1, **options)
    optimizer = torch.optim.SGD(
        [{"params": [module.w1, module.b1]}, {"params": [module.w2, module.b2]}],
        lr=0.1,
        momentum=momentum,
    )
    return net, optimizer


def train(net, optimizer, steps) -> None:
    for t in steps:
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.1 / (1 + 9 * ((t + i) % 4))  # falls and grows again
        train_step(net, optimizer, t, WIDTH)


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(kind: str, stops: list[int]):
    """State at the end, undisturbed and stopped at each of `stops`, where all starts anew."""
    net, optimizer = built(kind)
    train(net, optimizer, range(11))
    undisturbed = values(net)
    net, optimizer = built(kind)
    begin = 0
    for stop in stops:
        train(net, optimizer, range(begin, stop))
        state = saved_and_loaded(Outer(net).state_dict())
        inner = saved_and_loaded(optimizer.state_dict())
        net, optimizer = built(kind)
        keys = set(state)
        Outer(net).load_state_dict(state)
        assert set(state) == keys, "the caller's dict is left alone"
        optimizer.load_state_dict(inner)
        begin = stop
    train(net, optimizer, range(begin, 11))
    return undisturbed, values(net)


def saved_before_the_first_step():
    """The remembered initial parameters travel with the state."""
    net, optimizer = built("sharded")
    train(net, optimizer, range(6))
    undisturbed = values(net)
    net, optimizer = built("sharded")
    net(torch.ones(2, WIDTH).to(here.device()))
    state = saved_and_loaded(net.state_dict())
    assert "slowmo.initial.w1" in state
    net, optimizer = built("sharded")
    net.load_state_dict(state)
    train(net, optimizer, range(6))
    return undisturbed, values(net)


def resumed_in_all_ways():
    return [*(resumed(kind, [0, 1, 5, 8]) for kind in KINDS), saved_before_the_first_step()]


def test_resumed_training_has_the_same_bits():
    for results in spawned(2, resumed_in_all_ways):
        for kind, (undisturbed, again) in zip([*KINDS, "before"], results, strict=True):
            assert set(undisturbed) == set(again)
            for key, value in undisturbed.items():
                assert np.array_equal(value, again[key]), (kind, key)
            assert int(again["slowmo.num_updates"]) == (6 if kind == "before" else 11)


TRAINED = ("w1", "b1", "w2", "b2")
CONSOLIDATED = ("sharded", "whole", "push-sum sharded")


def steps_before(kind: str) -> int:
    """Until right after a slow step, where all replicas agree."""
    return 6 if "push" in kind else 4


def consolidated(folder: Path):
    found = []
    for kind in CONSOLIDATED:
        net, optimizer = built(kind, momentum=0.0)
        steps = steps_before(kind)
        train(net, optimizer, range(steps))
        before = values(net)
        state = net.consolidated_state_dict(for_resuming=True)
        if net.process_rank == 0:
            torch.save({"net": state, "inner": optimizer.state_dict()}, folder / kind)
        after = values(net)
        train(net, optimizer, range(steps, steps + 5))
        found.append((before, after, {k: v.numpy() for k, v in state.items()}, values(net)))
    return found


def continued(folder: Path):
    found = []
    for kind in CONSOLIDATED:
        saved = torch.load(folder / kind, weights_only=True)
        net, optimizer = built(kind, momentum=0.0)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["inner"])
        loaded, steps = values(net), steps_before(kind)
        train(net, optimizer, range(steps, steps + 5))
        found.append((loaded, values(net)))
    return found


def test_consolidated_state_loads_on_any_rank_of_any_number(tmp_path):
    results = spawned(2, consolidated, tmp_path)
    again = {world: spawned(world, continued, tmp_path) for world in (1, 2, 4)}
    for number, kind in enumerate(CONSOLIDATED):
        whole = results[0][number][2]
        assert "slowmo.rank" not in whole
        total = sum(whole[f"module.{k}"].size for k in TRAINED)
        assert whole["slowmo.whole_anchor"].size == total
        for rank, (before, after, same, _) in enumerate(result[number] for result in results):
            for key, value in before.items():
                assert np.array_equal(value, after[key]), "consolidating changes nothing"
            for key, value in same.items():
                assert np.array_equal(value, whole[key]), "all ranks hold the same"
            check_part(before, whole, "velocity", 0 if kind == "whole" else rank)
        for loaded in again.values():
            for rank, (state, _) in enumerate(result[number] for result in loaded):
                np.testing.assert_array_equal(state["module.w1"], whole["module.w1"])
                check_part(state, whole, "anchor", 0 if kind == "whole" else rank)
        # On the same processes it goes on as if undisturbed.
        for result, undisturbed in zip(again[2], results, strict=True):
            for key in (f"module.{k}" for k in TRAINED):
                ours, theirs = result[number][1][key], undisturbed[number][3][key]
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=key)


def check_part(state, whole, name: str, rank: int) -> None:
    """The state holds the part of this rank, padded, of the whole."""
    part = state[f"slowmo.{name}"]
    expected = whole[f"slowmo.whole_{name}"][rank * part.size : (rank + 1) * part.size]
    np.testing.assert_array_equal(part[: expected.size], expected)


class Waves(torch.nn.Module):
    """A module of every kind of parameter and buffer, of which two are one."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.tied = self.waves
        self.weight = torch.nn.Parameter(torch.ones(2, 3))
        self.base = torch.nn.Parameter(torch.ones(2).bfloat16(), requires_grad=False)
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.weight * (self.waves * x * (1 + 2j)).real
        return turned.square().sum() + (self.tied * (1 - 1j)).imag.sum()


def plain():
    """The state of all, and what each process holds."""
    module = Waves()
    net = SlowMo(module, 1, "average", slowmo_momentum=0.0, localsgd_frequency=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):  # the last step leaves replicas apart
        net(torch.tensor(1.0 + here.rank())).backward()
        optimizer.step()
        net.perform_slowmo(optimizer)
    module.phase += complex(here.rank(), 1)
    state = net.consolidated_state_dict()
    Waves().load_state_dict(state, strict=True)
    return [
        {k: v.detach().numpy() for k, v in values.items() if k != "base"}
        for values in (state, module.state_dict())
    ]


def test_a_plain_module_loads_the_state_of_all():
    states, own = zip(*spawned(3, plain), strict=True)
    for key in ("waves", "weight"):
        assert not np.array_equal(own[0][key], own[1][key])
        mean = np.mean([values[key] for values in own], axis=0)
        for state in states:
            np.testing.assert_allclose(state[key], mean, rtol=1e-5, err_msg=key)
    assert all(np.allclose(state["phase"], 1 + 1j) for state in states)


# Without devices.


def test_fairscales_dicts_load():
    """Theirs holds module.*, ps_weight and the flag; counters start anew."""
    weights = {k: v + 1 for k, v in torch.nn.Linear(3, 2).state_dict().items()}
    theirs = {f"module.{key}": value for key, value in weights.items()}
    theirs |= {"ps_weight": torch.tensor([1.0], dtype=torch.float16), "is_sgp_ps_numerator": True}
    net = build(slowmo_base_algorithm="sgp")
    net.num_updates = 5
    net.load_state_dict(theirs)
    assert net.num_updates == 0
    assert net.is_sgp_ps_numerator is True
    assert torch.equal(net.module.weight, weights["weight"])


def test_keys_are_fairscales_and_ours():
    state = build(slowmo_base_algorithm="sgp").state_dict()
    assert set(state) == {
        *("module.weight", "module.bias", "ps_weight", "is_sgp_ps_numerator"),
        *("slowmo.num_updates", "slowmo.exchanges", "slowmo.rank", "slowmo.world_size"),
    }
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    other = build(world=8, rank=5, slowmo_base_algorithm="sgp")
    other.load_state_dict(state)  # without parts of a rank it loads everywhere
