"""After a backward pass: outputs of any form, gradients inside a node."""

import dataclasses

import numpy as np
import pytest
import slowmo_here as here
import torch
from slowmo_models import values
from slowmo_spawned import spawned

from torch_compat.slowmo import SlowMoDistributedDataParallel


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    other: object = None


FORMS = {
    "tensor": lambda loss: loss,
    "dict": lambda loss: {"logits": loss.detach(), "nested": {"loss": [loss]}},
    "tuple": lambda loss: (None, "text", (loss,)),
    "dataclass": lambda loss: Output(loss.detach(), Output(loss)),
}
GET = {
    "tensor": lambda out: out,
    "dict": lambda out: out["nested"]["loss"][0],
    "tuple": lambda out: out[2][0],
    "dataclass": lambda out: out.other.loss,
}


class Shaped(torch.nn.Module):
    """Rank 3 does not use `sometimes`."""

    def __init__(self, form: str, rank: int) -> None:
        super().__init__()
        self.form, self.rank = form, rank
        self.always = torch.nn.Parameter(torch.ones(2))
        self.sometimes = torch.nn.Parameter(torch.ones(2))
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> object:
        used = self.always * self.frozen
        if self.rank != 3:
            used = used + 2 * self.sometimes
        return FORMS[self.form]((used * x).sum())


def gradients(form: str, passes: int):
    device, rank = here.device(), here.rank()
    module = Shaped(form, rank).to(device)
    net = SlowMoDistributedDataParallel(module, nprocs_per_node=2)
    for i in range(passes):
        GET[form](net(torch.full((2,), float(rank + 1 + i)).to(device))).backward()
    here.launch()
    assert module.frozen.grad is None
    return module.always.grad.tolist(), module.sometimes.grad.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_averaged_in_the_node(by, form):
    results = spawned(4, gradients, form, 1, by=by)
    assert [always for always, _ in results] == [[1.5] * 2] * 2 + [[3.5] * 2] * 2
    # In the second node one process has no gradient: it counts as zero, and nobody waits.
    assert [some for _, some in results] == [[3.0] * 2] * 2 + [[3.0] * 2] * 2


def test_accumulated_gradients():
    results = spawned(2, gradients, "tensor", 3)
    assert [always for always, _ in results] == [[1.5 + 2.5 + 3.5] * 2] * 2


class Partly(torch.nn.Module):
    """`by_turns` is used by one process at a time, or by none; `first` by all, in two steps."""

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank = rank
        self.empty = torch.nn.Parameter(torch.ones(0, dtype=dtype))
        for name in ("always", "by_turns", "first", "never", "frozen"):
            setattr(self, name, torch.nn.Parameter(torch.ones(3, dtype=dtype)))
        self.frozen.requires_grad_(False)

    def forward(self, t: int) -> torch.Tensor:
        used = self.always * self.frozen * (t + 1 + self.rank)
        if t % 3 == self.rank:
            used = used + self.by_turns * (t + 2)
        if t < 2:
            used = used + self.first * self.always
        return (used**2).sum()


def trained_by_adamw(wrapped: str, passes: int, dtype: torch.dtype, set_to_none: bool):
    """Parameters at the end; per step which gradients were None."""
    module = Partly(here.rank(), dtype).to(here.device())
    if wrapped == "DDP":
        net = torch.nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
    else:
        net = SlowMoDistributedDataParallel(module, nprocs_per_node=2, slowmo_momentum=0.0)
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


@pytest.mark.parametrize(
    ("passes", "dtype", "set_to_none"),
    [
        (1, torch.float32, True),
        (2, torch.float32, True),
        (1, torch.float32, False),
        (1, torch.bfloat16, True),
    ],
)
def test_gradients_that_no_process_has_are_those_of_ddp(by, passes, dtype, set_to_none):
    expected = spawned(2, trained_by_adamw, "DDP", passes, dtype, set_to_none)
    ours = spawned(2, trained_by_adamw, "SlowMo", passes, dtype, set_to_none, by=by)
    for (params, missing), (theirs, missing_there) in zip(ours, expected, strict=True):
        assert [row[1:] for row in missing] == [row[1:] for row in missing_there]
        for key, value in theirs.items():
            tolerance = 1e-6 if dtype == torch.float32 else 0.01
            np.testing.assert_allclose(params[key], value, rtol=0, atol=tolerance, err_msg=key)
        assert params["never"].tolist() == [1, 1, 1]


class Table(torch.nn.Module):
    """A table whose rows are looked up only where there are `ids`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(4, 2, sparse=True)
        self.bias = torch.nn.Parameter(torch.ones(2))

    def forward(self, ids: list[int]) -> torch.Tensor:
        return (self.bias + self.table(torch.tensor(ids)) if ids else self.bias).sum()


def rows_of_one_process(can_read: bool):
    """The table's gradient after a step in which process 0 uses it, and after one without use."""
    net = SlowMoDistributedDataParallel(
        Table(), nprocs_per_node=2, broadcast_parameters=True, slowmo_momentum=0.0
    )
    net._backend.may_read = lambda: can_read
    seen = []
    for ids in ([1, 3] if here.rank() == 0 else [], []):
        net.zero_grad()
        net(ids).backward()
        gradient = net.module.table.weight.grad
        seen.append(gradient if gradient is None else (gradient.layout, gradient.to_dense()))
    return seen


def test_sparse_gradients_that_one_process_lacks():
    for (layout, rows), none in spawned(2, rows_of_one_process, True):
        assert (layout, none) == (torch.sparse_coo, None)
        assert rows.tolist() == [[0, 0], [0.5, 0.5], [0, 0], [0.5, 0.5]]


def test_gradients_are_zero_where_values_cannot_be_read():
    for (_, rows), (_, unused) in spawned(2, rows_of_one_process, False):
        assert rows.tolist() == [[0, 0], [0.5, 0.5], [0, 0], [0.5, 0.5]]
        assert not unused.any()


class Returning(torch.nn.Module):
    """Results that hold parameters: by themselves, and in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> dict:
        return {"loss": (self.inner(x) * self.weight).sum(), "weight": self.weight, "from": self}


def hooks_after(passes: int) -> list[int]:
    module = Returning().to(here.device())
    net = SlowMoDistributedDataParallel(module, nprocs_per_node=2, broadcast_parameters=True)
    for _ in range(passes):
        out = net(torch.ones(3, 2).to(here.device()))
        (out["loss"] + out["weight"].sum()).backward()
    return [len(param._backward_hooks or ()) for param in module.parameters()]


def test_hooks_do_not_pile_up(by):
    assert spawned(2, hooks_after, 4, by=by) == [[1, 0, 0]] * 2


def two_forwards():
    """Two passes, one backward: gradients are exchanged once; a failed backward leaves no trace."""
    device, rank = here.device(), here.rank()
    module = Shaped("tensor", rank).to(device)
    net = SlowMoDistributedDataParallel(module, nprocs_per_node=2)
    x = torch.ones(2).to(device)
    counts = []
    call = net._after_backward._call
    net._after_backward._call = lambda *args: (counts.append(1), call(*args))
    failing = net(x)
    hook = module.always.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        failing.backward()
    hook.remove()
    net.zero_grad(set_to_none=True)
    (net(x) + net(2 * x)).backward()
    here.launch()
    return len(counts), module.always.grad.tolist()


def fail(gradient):
    raise RuntimeError("on purpose")


def test_two_forwards_and_a_failed_backward(by):
    assert spawned(2, two_forwards, by=by) == [(1, [3.0, 3.0])] * 2
