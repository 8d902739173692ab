"""After a backward pass: outputs of any form, gradients inside a node."""

import dataclasses

import pytest
import slowmo_here as here
import torch
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
    net._after_backward._call = lambda device: (counts.append(1), call(device))
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
