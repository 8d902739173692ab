"""Backward passes: of any form and number, gradients inside a node, numerators in between."""

import contextlib
import copy

import numpy as np
import pytest
import slowmo_here as here
import torch
from slowmo_models import take_step, values
from slowmo_spawned import spawned
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from jaxslowmo import topology
from torch_compat import broadcast_parameters
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo


class Partly(torch.nn.Module):
    """`by_turns` is used by one process at a time, or by none; `first` by all, in two steps."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.empty = torch.nn.Parameter(torch.ones(0, dtype=dtype))
        for name in ("always", "by_turns", "first", "never", "frozen"):
            setattr(self, name, torch.nn.Parameter(torch.ones(3, dtype=dtype)))
        self.frozen.requires_grad_(False)

    def forward(self, t: int) -> torch.Tensor:
        used = self.always * self.frozen * (t + 1 + here.rank())
        if t % 3 == here.rank():
            used = used + self.by_turns * (t + 2)
        if t < 2:
            used = used + self.first * self.always
        return (used**2).sum()


def trained_by_adamw(wrapped: str, passes: int, dtype: torch.dtype, set_to_none: bool):
    """Parameters at the end; per step which gradients were None."""
    module = Partly(dtype).to(here.device())
    if wrapped == "DDP":
        net = DistributedDataParallel(module, find_unused_parameters=True)
    else:
        net = SlowMo(module, nprocs_per_node=2, slowmo_momentum=0.0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    missing = []
    for t in range(8):
        for i in range(passes):
            net(t + i).backward()
        missing.append([param.grad is None for param in module.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        if wrapped != "DDP":
            net.perform_slowmo(optimizer)
    return values(module.float()), missing


CASES = [
    (1, torch.float32, True),
    (2, torch.float32, True),
    (1, torch.bfloat16, False),
]


def all_trained(wrapped: str, cases):
    return [trained_by_adamw(wrapped, *case) for case in cases]


def test_gradients_that_no_process_has_are_those_of_ddp(by):
    cases = CASES if by == "gloo" else CASES[1:2]
    expected = spawned(2, all_trained, "DDP", cases)
    found = spawned(2, all_trained, "SlowMo", cases, by=by)
    for ours, theirs in zip(found, expected, strict=True):
        for case, (params, missing), (wanted, missing_there) in zip(
            cases, ours, theirs, strict=True
        ):
            assert [row[1:] for row in missing] == [row[1:] for row in missing_there]
            tolerance = 0.01 if torch.bfloat16 in case else 1e-6
            for key, value in wanted.items():
                np.testing.assert_allclose(params[key], value, rtol=0, atol=tolerance, err_msg=key)
            assert params["never"].tolist() == [1, 1, 1]


class Table(torch.nn.Module):
    """A table whose rows are looked up only where there are `ids`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(4, 2, sparse=True)
        self.bias = torch.nn.Parameter(torch.ones(2))

    def forward(self, ids: list[int]) -> torch.Tensor:
        rows = (1 + here.rank()) * self.table(torch.tensor(ids)) if ids else 0
        return (self.bias + rows).sum()


def rows_of_processes(can_read: bool):
    """The table's gradient when process 0 uses it, when both do, and when none does."""
    broadcast_parameters(table := Table())
    net = SlowMo(table, nprocs_per_node=2, slowmo_momentum=0.0)
    net._backend.may_read = lambda: can_read
    seen = []
    for ids in ([1, 3] if here.rank() == 0 else [], [here.rank(), 3], []):
        net.zero_grad()
        net(ids).backward()
        gradient = net.module.table.weight.grad
        seen.append(gradient if gradient is None else (gradient.layout, gradient.to_dense()))
    return seen


def rows_where_values_can_be_read_and_not():
    return rows_of_processes(True), rows_of_processes(False)


def test_sparse_gradients_stay_sparse_and_may_be_missing():
    for readable, unreadable in spawned(2, rows_where_values_can_be_read_and_not):
        for (_, rows), (layout, both), _ in (readable, unreadable):
            assert rows.tolist() == [[0, 0], [0.5, 0.5], [0, 0], [0.5, 0.5]]
            assert both.tolist() == [[0.5, 0.5], [1, 1], [0, 0], [1.5, 1.5]]
            assert layout == torch.sparse_coo
        assert readable[0][0] == torch.sparse_coo
        assert readable[2] is None
        assert not unreadable[2][1].any(), "zero, where nobody knows that there is none"


class Several(torch.nn.Module):
    """A module with a loss of its own beside its output, and buffers that every pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        # torch_xla cannot differentiate batch norm in eval().
        self.norm = torch.nn.BatchNorm1d(3) if here.by_gloo() else torch.nn.LayerNorm(3)
        self.register_buffer("scale", torch.ones(3))
        self.second = torch.nn.Linear(3, 1)
        generator = torch.Generator().manual_seed(0)  # devices may be threads
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x) * self.scale)
        self.auxiliary = hidden.square().mean()
        return self.second(self.norm(hidden))


def inputs(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + here.rank())
    return torch.randn(4, 3, generator=generator).to(here.device())


def by_turns(net) -> None:
    net(inputs(0)).mean().backward()
    net(inputs(1)).square().mean().backward()


def two_then_two(net) -> None:
    first, second = net(inputs(0)).mean(), net(inputs(1)).square().mean()
    first.backward()
    second.backward()


def two_then_one(net) -> None:
    (net(inputs(0)).mean() + net(inputs(1)).square().mean()).backward()


def twice(net) -> None:
    loss = net(inputs(0)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def penalised(net) -> None:
    x = inputs(0).requires_grad_()
    out = net(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.mean() + slope.square().mean()).backward()


def in_a_window(net) -> None:
    with net.no_sync():
        net(inputs(0)).mean().backward()
    net(inputs(1)).square().mean().backward()


def apart(net) -> None:
    net(inputs(0)).mean().backward(retain_graph=True)
    inner_of(net).auxiliary.backward()


def in_no_sync(net) -> None:
    with net.no_sync():
        net(inputs(0)).mean().backward(retain_graph=True)
        inner_of(net).auxiliary.backward()
    net(inputs(1)).mean().backward()


def after_a_failed_one(net) -> None:
    def fail(gradient):
        raise RuntimeError("on purpose")

    failing, first = net(inputs(0)).mean(), next(net.parameters())
    hook = first.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        failing.backward()
    hook.remove()
    net.zero_grad()
    net(inputs(1)).mean().backward()
    assert len(first._post_accumulate_grad_hooks or ()) <= 1, "hooks do not pile up"


def inside_alone(net) -> None:
    """A pass before, and without, any forward pass of the wrapper."""
    inner_of(net).second(inputs(0)).mean().backward()
    net(inputs(1)).mean().backward()


def checkpointed(net) -> None:
    checkpoint(net, inputs(0).requires_grad_(), use_reentrant=True).square().mean().backward()


def inner_of(net) -> torch.nn.Module:
    return getattr(net, "module", net)


PASSES = (by_turns, two_then_two, two_then_one, twice, penalised, in_a_window, checkpointed)
IN_NODES = (*PASSES, apart, in_no_sync, inside_alone, after_a_failed_one)


class Plain(torch.nn.Module):
    """The module without a wrapper, under the same calls."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def no_sync(self):
        return contextlib.nullcontext()


def gradients_of(wrap, run) -> list[np.ndarray]:
    module = Several().to(here.device())
    run(wrap(module))
    here.launch()
    return [param.grad.cpu().numpy() for param in module.parameters()]


def in_a_node() -> dict[str, tuple]:
    def wrap(module):
        return SlowMo(module, nprocs_per_node=2, slowmo_momentum=0.0)

    # torch's checkpoint does not know XLA devices, which compile every pass.
    passes = IN_NODES if here.by_gloo() else (two_then_two, apart, inside_alone)
    return {f.__name__: (gradients_of(wrap, f), gradients_of(Plain, f)) for f in passes}


def test_every_backward_pass_is_averaged_in_the_node(by):
    """Beside the mean of what each process has without a wrapper."""
    first, second = spawned(2, in_a_node, by=by)
    for name in first:
        means = [(a + b) / 2 for a, b in zip(first[name][1], second[name][1], strict=True)]
        for ours, _ in (first[name], second[name]):
            for mine, mean in zip(ours, means, strict=True):
                np.testing.assert_allclose(mine, mean, rtol=1e-4, atol=1e-6, err_msg=name)


def with_moving_weights() -> dict[str, tuple]:
    """Gradients where parameters become numerators after a backward pass."""
    mixing = topology.self_weighted([0.3, 0.6])
    options = {"slowmo_base_algorithm": "sgp", "mixing": mixing, "slowmo_momentum": 0.0}
    found = {}
    for run in PASSES:
        module = Several().to(here.device())
        net = SlowMo(module, nprocs_per_node=1, broadcast_buffers=False, **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            net(inputs(5)).sum().backward()
            optimizer.step()
            net.zero_grad()
            net.perform_slowmo(optimizer)
        assert abs(float(net.ps_weight) - 1) > 0.1
        module.auxiliary = None
        beside = copy.deepcopy(module)
        run(net)
        assert net.is_sgp_ps_numerator
        run(Plain(beside))
        grads = [[p.grad.numpy().copy() for p in m.parameters()] for m in (module, beside)]
        found[run.__name__] = grads
    net(inputs(0)).mean().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward"):
        module.auxiliary.backward()
    return found


def test_gradients_are_those_of_estimates_where_weights_move():
    for found in spawned(2, with_moving_weights):
        for name, (ours, plain) in found.items():
            for mine, other in zip(ours, plain, strict=True):
                np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5, err_msg=name)


def in_windows(net, pattern: str):
    """Gradients and buffers after each pass: "n" inside of no_sync, "s" outside, "f" forward alone
    inside of it and the backward pass after it."""
    history = []
    for number, letter in enumerate(pattern):
        with contextlib.nullcontext() if letter == "s" else net.no_sync():
            loss = net(inputs(number)).square().mean()
            if letter == "n":
                loss.backward()
        if letter != "n":
            loss.backward()
        history += [p.grad.numpy().copy() for p in net.parameters()]
        history += [b.numpy().copy() for b in net.buffers()]
        if letter == "s":
            net.zero_grad()
    return history


def beside_ddp():
    wraps = (lambda module: SlowMo(module, nprocs_per_node=2), DistributedDataParallel)
    return [in_windows(wrap(Several()), p) for p in ("snnsns", "fsffs") for wrap in wraps]


def test_no_sync_is_that_of_ddp():
    for runs in spawned(2, beside_ddp):
        for mine, other in zip(runs[0] + runs[2], runs[1] + runs[3], strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-7)


def evaluating_alone(alone: bool):
    """In some steps process 0 alone takes gradients in eval(), through both kinds of output."""
    module = Several().to(here.device())
    module.second.bias.requires_grad_(False)
    net = SlowMo(module, nprocs_per_node=2, slowmo_frequency=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    slopes = []
    for step in range(4):
        if alone and step % 2 and here.rank() == 0:
            net.eval()
            module.requires_grad_(True)
            x = inputs(7).requires_grad_()
            for through_output in (True, False):
                out = net(x).sum()
                (out if through_output else module.auxiliary).backward()
                slopes.append(x.grad.norm().item())
            net.zero_grad()
            module.second.bias.requires_grad_(False)
            net.train()
        take_step(net, optimizer, net(inputs(step)).square().mean())
    return [param.detach().cpu().numpy() for param in module.parameters()], slopes


def evaluating_and_not():
    return evaluating_alone(True), evaluating_alone(False)


def test_in_eval_nothing_is_exchanged(by):
    for rank, ((ours, slopes), (plain, _)) in enumerate(spawned(2, evaluating_and_not, by=by)):
        assert all(slopes)
        assert len(slopes) == (4 if rank == 0 else 0)
        for mine, other in zip(ours, plain, strict=True):
            np.testing.assert_array_equal(mine, other)
