"""Parameters are known by name: optimizers in any order and number, frozen and unfrozen ones."""

import numpy as np
import pytest
import slowmo_here as here
import torch
from slowmo_models import take_step, values
from slowmo_spawned import BACKENDS, spawned

from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

NAMES = ("a", "b", "c", "d", "e")  # of equal sizes, so that an order by sizes would mix them
RATES = {"a": 0.1, "b": 0.2, "c": 0.1, "d": 0.3, "e": 0.2}
STEPS, LOCAL, SLOW, MOMENTUM, SLOW_LR = 9, 2, 4, 0.6, 0.7


def start(name: str) -> np.ndarray:
    return 10.0 * NAMES.index(name) + np.arange(3.0)


def gradient(name: str, step: int, rank: int) -> np.ndarray:
    return np.random.default_rng([NAMES.index(name), step, rank]).normal(size=3)


class Case:
    """A drawn run: which parameters train in which step, and how slow steps are kept."""

    def __init__(self, seed: int, world: int) -> None:
        rng = np.random.default_rng(seed)
        self.seed = seed
        self.node = 2 if world == 4 else 1  # processes of a node, whose gradients are averaged
        self.is_sharded = seed % 2 == 0
        self.has_masters = seed % 3 == 0
        self.local = LOCAL if seed % 4 < 2 else 100
        self.frozen = {}  # by name the steps in which it requires no gradient
        for name in NAMES[1:]:
            begin, end = sorted(rng.integers(1, STEPS + 2, size=2).tolist())
            if rng.random() < 0.6:
                self.frozen[name] = range(1 if rng.random() < 0.4 else begin, end)
        self.forgets_frozen = bool(rng.random() < 0.5)  # new optimizers, of what trains

    def trains(self, name: str, step: int) -> bool:
        return step not in self.frozen.get(name, ())

    def wrap(self, module: torch.nn.Module) -> SlowMo:
        return SlowMo(
            module,
            nprocs_per_node=self.node,
            slowmo_memory_efficient=self.is_sharded,
            slowmo_momentum=MOMENTUM,
            slowmo_lr=SLOW_LR,
            slowmo_frequency=SLOW,
            localsgd_frequency=self.local,
        )


def expected(case: Case, world: int) -> list[dict[str, np.ndarray]]:
    """The parameters of each process at the end, by the documented rules."""
    params = {n: np.tile(start(n), (world, 1)) for n in NAMES}
    slow: dict[str, list] = {}  # anchor and velocity of what slow momentum knows
    sent: set[str] = set()
    for step in range(1, STEPS + 1):
        now = {n for n in NAMES if case.trains(n, step)}
        new = {n: params[n].copy() for n in now - sent}
        sent |= now
        for n in now:
            grads = np.stack([gradient(n, step, r) for r in range(world)])
            of_nodes = grads.reshape(-1, case.node, 3).mean(1)
            params[n] -= RATES[n] * np.repeat(of_nodes, case.node, axis=0)
        fresh = {n: [new.get(n, params[n]).copy(), 0.0] for n in now}
        slow = {n: slow.get(n, fresh[n]) for n in now}
        is_slow, average = step % SLOW == 0, step % case.local == 0
        if average or (is_slow and case.is_sharded):
            for n in sent:
                params[n][:] = params[n].mean(0)
        if is_slow:
            for n in now:
                anchor, velocity = slow[n]
                velocity = MOMENTUM * velocity + (anchor - params[n])
                anchor = anchor - SLOW_LR * velocity
                slow[n], params[n] = [anchor, velocity], anchor.copy()
        if average or (is_slow and case.is_sharded):
            sent = set()
    return [{n: params[n][rank] for n in NAMES} for rank in range(world)]


class Prescribed(torch.nn.Module):
    """Its gradients are those of `gradient`."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            setattr(self, name, torch.nn.Parameter(torch.tensor(start(name)).float()))

    def forward(self, step: int) -> torch.Tensor:
        losses = [
            (param * torch.tensor(gradient(name, step, here.rank())).float().to(param)).sum()
            for name, param in self.named_parameters()
            if param.requires_grad
        ]
        return sum(losses)


def optimizers_of(trained: dict[str, torch.Tensor], rng) -> list[torch.optim.Optimizer]:
    """One to three optimizers that hold the tensors in an order that is not the module's."""
    # With an order that changes, in time or between devices of one process, torch_xla confuses
    # tensors of equal shape, without a wrapper, too.
    names = rng.permutation(list(trained)).tolist() if here.by_gloo() else [*trained][::-1]
    parts = [part for part in np.array_split(names, rng.integers(1, 4)) if len(part)]
    groups = [[{"params": [trained[n]], "lr": RATES[n]} for n in part] for part in parts]
    return [torch.optim.SGD(group, lr=1.0) for group in groups]


def trained(seed: int) -> dict[str, np.ndarray]:
    case, device = Case(seed, here.world()), here.device()
    rng = np.random.default_rng([seed, here.rank()])
    module = Prescribed().to(device)
    net = case.wrap(module)
    named = dict(module.named_parameters())
    masters = {n: torch.nn.Parameter(p.detach().clone()) for n, p in named.items()}
    held = masters if case.has_masters else named
    optimizers = optimizers_of(held, rng)
    for step in range(1, STEPS + 1):
        for name, param in named.items():
            param.requires_grad_(case.trains(name, step))
        if case.forgets_frozen:
            now = {n: held[n] for n in NAMES if case.trains(n, step)}
            optimizers = optimizers_of(now, rng)
        if step == 6:  # a new program, whose optimizers hold parameters in another order
            state = net.state_dict()
            net = case.wrap(module)
            net.load_state_dict(state)
            if not case.forgets_frozen:
                optimizers = optimizers_of(held, rng)
        net(step).backward()
        for name, master in masters.items():
            master.grad = named[name].grad
        for optimizer in optimizers:
            optimizer.step()
        if case.has_masters:
            with torch.no_grad():
                for name, master in masters.items():
                    named[name].copy_(master)
        net.zero_grad(set_to_none=True)
        net.perform_slowmo(
            optimizers, fp32_params=[*masters.values()] if case.has_masters else None
        )
        here.launch()
    return values(module)


# Among them are parameters unfrozen later, and frozen until the end.
SEEDS = range(12)


def all_trained(seeds) -> list[dict[str, np.ndarray]]:
    return [trained(seed) for seed in seeds]


@pytest.mark.parametrize(("world", "by"), [(2, "gloo"), *((4, by) for by in BACKENDS)])
def test_any_order_and_number_of_optimizers_frozen_and_unfrozen(world, by):
    seeds = SEEDS if by == "gloo" else SEEDS[::4]
    results = spawned(world, all_trained, seeds, by=by)
    for i, seed in enumerate(seeds):
        wanted = expected(Case(seed, world), world)
        for rank, result in enumerate(results):
            for name in NAMES:
                where = f"case {seed}, {name} in process {rank}"
                np.testing.assert_allclose(
                    result[i][name], wanted[rank][name], rtol=1e-5, atol=1e-5, err_msg=where
                )


def frozen_with_a_gradient() -> dict[str, np.ndarray]:
    """Momentum and weight decay move a frozen parameter until its gradient is None."""
    module = Prescribed()
    net = SlowMo(module, 1, slowmo_frequency=4, localsgd_frequency=2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(8):
        module.b.requires_grad_(step < 3)
        net(step).backward()
        optimizer.step()
        net.perform_slowmo(optimizer)
        net.zero_grad(set_to_none=False)
    return values(module)


def all_frozen_for_a_while() -> dict[str, np.ndarray]:
    module = Prescribed()
    net = SlowMo(module, 1, slowmo_frequency=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        module.requires_grad_(step != 2)
        before = values(module)
        if step != 2:
            net(step).backward()
            optimizer.step()
        net.zero_grad(set_to_none=True)
        net.perform_slowmo(optimizer)
        assert np.array_equal(before["a"], values(module)["a"]) == (step == 2)
    return values(module)


def called_with_other_weights(is_called: bool) -> dict[str, np.ndarray]:
    net = SlowMo(Prescribed(), 1, slowmo_frequency=1)
    if is_called:
        others = {name: param + 5 for name, param in net.named_parameters()}
        torch.func.functional_call(net, others, (1,)).backward()
        net.zero_grad()
    take_step(net, torch.optim.SGD(net.parameters(), lr=0.1), net(1))
    return values(net.module)


def in_groups(number: int) -> dict[str, np.ndarray]:
    """Rates that fall and grow again, and a parameter that comes later."""
    module = Prescribed()
    net = SlowMo(module, 1, slowmo_frequency=2, localsgd_frequency=2, slowmo_momentum=0.9)
    parts = np.array_split(range(len(NAMES)), number)
    groups = [{"params": [getattr(module, NAMES[i]) for i in part]} for part in parts]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for step in range(10):
        module.b.requires_grad_(step >= 4)
        for group in optimizer.param_groups:
            group["lr"] = 0.001 if 4 <= step < 6 else 0.1
        take_step(net, optimizer, net(step))
    return values(module)


def of_masters(dtype: torch.dtype) -> dict[str, np.ndarray]:
    """Masters in float32; those of all but "a" move by less than a step of bfloat16."""
    module = Prescribed().to(dtype)
    params = [*module.parameters()]
    masters = [torch.nn.Parameter(p.detach().float().clone()) for p in params]
    net = SlowMo(module, 1, slowmo_frequency=4, localsgd_frequency=2)
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    for step in range(8):
        net(step).backward()
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float() if param is module.a else torch.full((3,), 0.01)
        optimizer.step()
        for param, master in zip(params, masters, strict=True):
            param.data.copy_(master)
        net.zero_grad()
        net.perform_slowmo(optimizer, fp32_params=masters)
    for param, master in zip(params, masters, strict=True):
        assert torch.equal(param, master.to(dtype))
    return {name: x.detach().numpy() for name, x in zip(NAMES, masters, strict=True)}


def trained_by_hand():
    pairs = [(called_with_other_weights(False), called_with_other_weights(True))]
    pairs.append((in_groups(1), in_groups(5)))
    runs = [frozen_with_a_gradient(), all_frozen_for_a_while(), of_masters(torch.bfloat16)]
    return pairs, runs, of_masters(torch.float32)


def test_functional_calls_groups_frozen_parameters_and_masters():
    (pairs, first, precise), (_, second, _) = spawned(2, trained_by_hand)
    for one, other in [*pairs, *zip(first, second, strict=True)]:
        for name in NAMES:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-6, err_msg=name)
    # Where processes differ, what is exchanged is rounded; what is not sent stays.
    np.testing.assert_allclose(first[-1].pop("a"), precise["a"], atol=0.03)
    for name, found in first[-1].items():
        np.testing.assert_allclose(found, precise[name], rtol=1e-5)
        assert (np.abs(found - start(name)) > 0.01).all()


class Adapted(torch.nn.Module):
    """A small adapter over a base that is frozen, in dtypes of which a mean would change values."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        base = torch.randn(64, 64, generator=generator)
        self.base = torch.nn.Parameter(base.bfloat16(), requires_grad=False)
        self.large = torch.nn.Parameter(torch.full((4,), 2**24 + 1), requires_grad=False)
        self.flags = torch.nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.adapter = torch.nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.base.float() + self.adapter).square().mean()


WAYS = {
    "slowmo": {"slowmo_frequency": 2, "localsgd_frequency": 1},
    "whole": {"slowmo_frequency": 2, "localsgd_frequency": 1, "slowmo_memory_efficient": False},
    "sgp": {"slowmo_momentum": 0.0, "slowmo_base_algorithm": "sgp"},
}


def adapted(way: str):
    """Whether the base has kept its bits, and the most bytes that an exchange has sent."""
    module = Adapted().to(here.device())
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    net = SlowMo(module, nprocs_per_node=1, **WAYS[way])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sent = []
    for name in ("all_reduce", "reduce_scatter", "all_gather", "permute"):
        setattr(net._backend, name, weighed(getattr(net._backend, name), sent))
    for step in range(4):
        x = torch.full((2, 64), 1.0 + here.rank() + step).to(here.device())
        take_step(net, optimizer, net(x))
    kept = [torch.equal(p, before[n]) for n, p in module.named_parameters() if n != "adapter"]
    state = net.consolidated_state_dict()
    kept += [torch.equal(state[n], before[n].cpu()) for n in before if n != "adapter"]
    return kept, max(sent), module.adapter.detach().cpu().numpy()


def weighed(collective, sent: list):
    def call(first, *args):
        tensors = first if isinstance(first, list) else [first]
        sent.append(sum(t.numel() * t.element_size() for t in tensors))
        return collective(first, *args)

    return call


def adapted_in_all_ways():
    return {way: adapted(way) for way in WAYS}


def test_frozen_parameters_are_neither_sent_nor_written(by):
    results = spawned(3, adapted_in_all_ways, by=by)
    for way in WAYS:
        for kept, most, adapter in (result[way] for result in results):
            assert kept == [True] * 6, way
            assert most <= 4 * (3 * 64 + 3), f"{way}: three of the adapter's size"
            assert np.abs(adapter).max() > 0
            if way != "sgp":
                np.testing.assert_array_equal(adapter, results[0][way][2])


def trained_otherwise(what: str) -> str:
    """The error of processes that do not train the same."""
    module = Prescribed()
    first = here.rank() == 0
    if what == "frozen":
        (module.b if first else module.c).requires_grad_(False)
    net = SlowMo(module, 1, slowmo_momentum=0.0 if what == "frozen" else 0.5)
    held = [p for n, p in module.named_parameters() if what == "frozen" or n in ("ab", "ac")[first]]
    optimizer = torch.optim.SGD(held, lr=0.1)
    try:
        net(1).backward()
        net.perform_slowmo(optimizer, others="fairscale")
    except ValueError as error:
        return str(error)
    return ""


def all_otherwise():
    return trained_otherwise("frozen"), trained_otherwise("held")


def test_processes_that_train_different_parameters_are_named():
    for texts in spawned(2, all_otherwise):
        for text in texts:
            assert "`module`" in text
            assert "'b', 'c'" in text
            assert "processes 1 of 2" in text
