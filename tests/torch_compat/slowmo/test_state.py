"""What a wrapper saves and loads: it continues with the same bits."""

import io

import numpy as np
import pytest
import slowmo_here as here
import torch
from slowmo_models import Perceptron, train_step, values
from slowmo_spawned import spawned

from jaxslowmo import topology
from torch_compat.slowmo import SlowMoDistributedDataParallel

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
    "push-sum whole": {**PUSH_SUM, "slowmo_memory_efficient": False},
    "averages only": {"slowmo_momentum": 0.0, "localsgd_frequency": 3},
}


class Outer(torch.nn.Module):
    """A module that has the wrapper inside."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.scale = torch.nn.Parameter(torch.ones(2))


def built(kind: str):
    options = dict(KINDS[kind])
    if here.world() != 2:
        options.pop("mixing", None)
    module = Perceptron(WIDTH, 6)
    module.register_buffer("seen", torch.arange(3))
    net = SlowMoDistributedDataParallel(module.to(here.device()), nprocs_per_node=1, **options)
    optimizer = torch.optim.SGD(
        [{"params": [module.w1, module.b1]}, {"params": [module.w2, module.b2]}],
        lr=0.1,
        momentum=0.9,
    )
    return net, optimizer


def train(net, optimizer, steps) -> None:
    for t in steps:
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.1 / (1 + 9 * ((t + i) % 4))  # falls and grows again
        train_step(net, optimizer, t, WIDTH)


def everything(net) -> dict[str, np.ndarray]:
    return values(net)


def saved_and_loaded(value, save=torch.save):
    file = io.BytesIO()
    save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(kind: str, stops: list[int], save=torch.save):
    """State at the end, undisturbed and stopped at each of `stops`, where all starts anew."""
    net, optimizer = built(kind)
    train(net, optimizer, range(11))
    undisturbed = everything(net)
    net, optimizer = built(kind)
    begin = 0
    for stop in stops:
        train(net, optimizer, range(begin, stop))
        state = saved_and_loaded(Outer(net).state_dict(), save)
        inner = saved_and_loaded(optimizer.state_dict(), save)
        net, optimizer = built(kind)
        keys = set(state)
        Outer(net).load_state_dict(state)
        assert set(state) == keys, "the caller's dict is left alone"
        optimizer.load_state_dict(inner)
        begin = stop
    train(net, optimizer, range(begin, 11))
    return undisturbed, everything(net)


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_training_has_the_same_bits(kind):
    for undisturbed, again in spawned(2, resumed, kind, [0, 1, 5, 8]):
        assert set(undisturbed) == set(again)
        for key, value in undisturbed.items():
            assert np.array_equal(value, again[key]), key
        assert int(again["slowmo.num_updates"]) == 11


def between_forward_and_first_step(kind: str):
    """The remembered initial parameters travel with the state."""
    net, optimizer = built(kind)
    train(net, optimizer, range(6))
    undisturbed = everything(net)
    net, optimizer = built(kind)
    net(torch.ones(2, WIDTH).to(here.device()))
    state = saved_and_loaded(net.state_dict())
    assert "slowmo.initial" in state
    net, optimizer = built(kind)
    net.load_state_dict(state)
    train(net, optimizer, range(6))
    return undisturbed, everything(net)


def test_saved_before_the_first_step():
    for undisturbed, again in spawned(2, between_forward_and_first_step, "sharded"):
        for key, value in undisturbed.items():
            assert np.array_equal(value, again[key]), key


def on_host(value):
    """A tensor that is loaded on any device."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


def consolidated(kind: str, steps: int, path: str):
    net, optimizer = built(kind)
    train(net, optimizer, range(steps))
    before = everything(net)
    state = net.consolidated_state_dict()
    if net.process_rank == 0:
        inner = torch.utils._pytree.tree_map(on_host, optimizer.state_dict())
        torch.save({"net": state, "inner": inner}, path)
    after = everything(net)
    train(net, optimizer, range(steps, steps + 5))
    return before, after, {k: v.numpy() for k, v in state.items()}, everything(net)


def continued(kind: str, steps: int, path: str):
    saved = torch.load(path, weights_only=True)
    net, optimizer = built(kind)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["inner"])
    loaded = everything(net)
    train(net, optimizer, range(steps, steps + 5))
    return loaded, everything(net)


@pytest.mark.parametrize("kind", ["sharded", "whole", "push-sum sharded"])
def test_consolidated_state_loads_on_any_rank_of_any_number(kind, tmp_path):
    path = str(tmp_path / "state.pt")
    steps = 6 if "push" in kind else 4  # right after a slow step, where all replicas agree
    results = spawned(2, consolidated, kind, steps, path)
    before, after, whole, _ = results[0]
    for key, value in before.items():
        assert np.array_equal(value, after[key]), "consolidating changes nothing"
    for key, value in results[1][2].items():
        assert np.array_equal(value, whole[key]), "all ranks hold the same"
    assert "slowmo.rank" not in whole
    total = sum(whole[f"module.{k}"].size for k in ("w1", "b1", "w2", "b2"))
    assert whole["slowmo.whole_anchor"].size == total
    for rank, (rank_before, *_) in enumerate(results):
        part = rank_before["slowmo.velocity"]
        if kind != "whole":
            expected = whole["slowmo.whole_velocity"][rank * part.size : (rank + 1) * part.size]
            np.testing.assert_array_equal(part[: expected.size], expected)
        np.testing.assert_allclose(rank_before["module.w1"], whole["module.w1"], atol=1e-6)
    for world in (1, 2, 4):
        again = spawned(world, continued, kind, steps, path)
        for rank, (loaded, _) in enumerate(again):
            np.testing.assert_array_equal(loaded["module.w1"], whole["module.w1"])
            size = loaded["slowmo.anchor"].size
            start = 0 if kind == "whole" else rank * size
            expected = whole["slowmo.whole_anchor"][start : start + size]
            np.testing.assert_array_equal(loaded["slowmo.anchor"][: expected.size], expected)
        if world == 2 and "push" not in kind:
            # The inner optimizer's momentum is rank 0's.
            ours, theirs = again[0][1]["module.w1"], results[0][3]["module.w1"]
            np.testing.assert_allclose(ours, theirs, atol=0.05)


# Without devices: what is refused.


def with_anchor(net, length=2, ends=(8,)):
    own = {
        "slowmo.anchor": torch.arange(length, dtype=torch.float32),
        "slowmo.velocity": torch.ones(length),
        "slowmo.rates": torch.tensor([0.1] * len(ends), dtype=torch.float64),
        "slowmo.ends": torch.tensor(ends),
    }
    return net.state_dict() | own


@pytest.mark.parametrize(("world", "rank"), [(4, 2), (8, 1)])
def test_parts_of_another_rank_or_world_are_refused(build, world, rank):
    state = with_anchor(build())
    build().load_state_dict(state)
    with pytest.raises(ValueError, match=r"saved by rank 1 of 4 .* this is rank . of .*consol"):
        build(world=world, rank=rank).load_state_dict(state)
    with pytest.raises(ValueError, match=r"saved by rank 1 of 4"):
        Outer(build(world=world, rank=rank)).load_state_dict(
            {"scale": torch.ones(2), **{f"net.{key}": value for key, value in state.items()}}
        )


def test_without_parts_of_a_rank_a_dict_loads_everywhere(build):
    net = build()
    net.num_updates = 7
    other = build(world=8, rank=5)
    other.load_state_dict(net.state_dict())
    assert other.num_updates == 7
    gossiping = build(slowmo_base_algorithm="sgp")
    build(world=8, rank=5, slowmo_base_algorithm="sgp").load_state_dict(gossiping.state_dict())


def test_a_moved_weight_belongs_to_its_rank(build):
    options = {
        "slowmo_base_algorithm": "sgp",
        "mixing": topology.self_weighted([0.3, 0.5, 0.6, 0.4]),
        "slowmo_momentum": 0.0,
    }
    net = build(**options)
    net.ps_weight = torch.tensor([1.25])
    state = net.state_dict()
    with pytest.raises(ValueError, match=r"saved by rank 1 of 4"):
        build(rank=0, **options).load_state_dict(state)
    with pytest.raises(ValueError, match=r"push-sum weight of 1.25, but with this `graph`"):
        build(slowmo_base_algorithm="sgp", slowmo_momentum=0.0).load_state_dict(state)
    same = build(**options)
    same.load_state_dict(state)
    assert same.ps_weight.tolist() == [1.25]


@pytest.mark.parametrize("rates", [[0.1], []])
def test_dicts_from_before_the_bound_load(build, rates):
    """Of a velocity made at an unknown rate the next slow step carries no more than all."""
    net = build()
    state = with_anchor(net) | {"slowmo.rates": torch.tensor(rates, dtype=torch.float64)}
    net.load_state_dict(state)
    kept = net._replica.slow.momentum.rates
    assert (kept.last, kept.made_at, kept.since) == (rates or [0.0], [0.0], [0.0])
    assert kept.carry([0.5], 0.5, is_bounded=True) == [1.0 if rates else 0.5]


def test_another_way_to_keep_slow_momentum_is_refused(build):
    with pytest.raises(ValueError, match=r"holds 2 elements .*`slowmo_memory_efficient`=False"):
        build(slowmo_memory_efficient=False).load_state_dict(with_anchor(build()))


def test_slow_momentum_without_a_place_for_it(build):
    net = build(slowmo_momentum=0.0)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*slowmo.anchor"):
        net.load_state_dict(with_anchor(build()))
    net.load_state_dict(with_anchor(build()), strict=False)


@pytest.mark.parametrize("flag", [True, torch.tensor(True)])
def test_fairscales_dicts_load(build, flag):
    """Theirs holds module.*, ps_weight and the flag; counters start anew."""
    weights = {k: v + 1 for k, v in torch.nn.Linear(3, 2).state_dict().items()}
    theirs = {f"module.{key}": value for key, value in weights.items()}
    theirs |= {"ps_weight": torch.tensor([1.0], dtype=torch.float16), "is_sgp_ps_numerator": flag}
    net = build(slowmo_base_algorithm="sgp")
    net.num_updates = 5
    keys = list(theirs)
    net.load_state_dict(theirs)
    assert list(theirs) == keys
    assert net.num_updates == 0
    assert net.is_sgp_ps_numerator is True
    assert torch.equal(net.module.weight, weights["weight"])
    local = build()
    local.load_state_dict({key: theirs[key] for key in keys if key.startswith("module.")})
    assert torch.equal(local.module.bias, weights["bias"])


def test_keys_are_fairscales_and_ours(build):
    state = build(slowmo_base_algorithm="sgp").state_dict()
    assert set(state) == {
        *("module.weight", "module.bias", "ps_weight", "is_sgp_ps_numerator"),
        *("slowmo.num_updates", "slowmo.exchanges", "slowmo.rank", "slowmo.world_size"),
    }
    assert all(isinstance(value, torch.Tensor) for value in state.values())
