"""Forward and backward passes: buffers, gradients inside a node, outputs of any form."""

import dataclasses

import numpy as np
import pytest
import torch
import torch_xla
from slowmo_models import Perceptron, values
from slowmo_spawned import spawned

from jaxslowmo import topology
from torch_compat import runtime
from torch_compat.slowmo import SlowMoDistributedDataParallel


def here() -> tuple[torch.device, int]:
    return torch_xla.device(), torch_xla.runtime.global_ordinal()


class Buffered(torch.nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("counts", torch.tensor([2**40 + rank, rank]))
        self.register_buffer("flags", torch.tensor([rank == 0, rank == 1, True]))
        self.register_buffer("means", torch.full((2,), float("nan") if rank else 0.1))
        self.register_buffer("rounded", torch.full((2,), 0.1 + rank, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("unsaved", torch.tensor(7.0 + rank), persistent=False)

    def forward(self) -> torch.Tensor:
        return self.weight * self.unsaved


def broadcast(training: bool, broadcast_buffers: bool):
    device, rank = here()
    net = SlowMoDistributedDataParallel(
        Buffered(rank).to(device), nprocs_per_node=1, broadcast_buffers=broadcast_buffers
    )
    net.train(training)
    with torch.no_grad():
        seen = net()
    runtime.run_pending()
    state = {k: v.float() for k, v in net.module.state_dict().items() if k != "counts"}
    runtime.run_pending()
    state = {k: v.cpu().numpy() for k, v in state.items()}
    return seen.cpu().numpy(), net.module.counts.tolist(), state


@pytest.mark.parametrize("training", [True, False])
def test_buffers_of_every_dtype_are_rank_0s(training):
    for seen, counts, state in spawned(4, broadcast, training, True):
        assert seen.tolist() == [7, 7, 7]
        assert counts == [2**40, 0]
        assert state["flags"].tolist() == [1, 0, 1]
        np.testing.assert_allclose(state["means"], 0.1, rtol=1e-6)
        np.testing.assert_allclose(state["rounded"], 0.1, rtol=1e-2)


def test_buffers_stay_where_told_so():
    results = spawned(2, broadcast, True, False)
    assert [seen[0] for seen, _, _ in results] == [7, 8]
    assert [counts for _, counts, _ in results] == [[2**40, 0], [2**40 + 1, 1]]


def batch_norm():
    """Also what the batches' own statistics make of the buffers."""
    device, rank = here()
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).to(device)
    net = SlowMoDistributedDataParallel(module, nprocs_per_node=1, localsgd_frequency=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for t in range(3):
        net(torch.full((5, 4), 1.0 + rank + t).to(device)).sum().backward()
        optimizer.step()
        net.zero_grad()
        net.perform_slowmo(optimizer)
    net.eval()
    with torch.no_grad():
        net(torch.ones(2, 4).to(device))
    return values(net.module)


def test_batch_norm():
    first, second = spawned(2, batch_norm)
    assert first["1.num_batches_tracked"] == 3
    for key, value in first.items():
        np.testing.assert_allclose(value, second[key], rtol=1e-6, err_msg=key)


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
    device, rank = here()
    module = Shaped(form, rank).to(device)
    net = SlowMoDistributedDataParallel(module, nprocs_per_node=2)
    for i in range(passes):
        GET[form](net(torch.full((2,), float(rank + 1 + i)).to(device))).backward()
    runtime.run_pending()
    assert module.frozen.grad is None
    return module.always.grad.tolist(), module.sometimes.grad.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_averaged_in_the_node(form):
    results = spawned(4, gradients, form, 1)
    assert [always for always, _ in results] == [[1.5] * 2] * 2 + [[3.5] * 2] * 2
    # In the second node one process has no gradient: it counts as zero, and nobody waits.
    assert [some for _, some in results] == [[3.0] * 2] * 2 + [[3.0] * 2] * 2


def test_accumulated_gradients():
    results = spawned(2, gradients, "tensor", 3)
    assert [always for always, _ in results] == [[1.5 + 2.5 + 3.5] * 2] * 2


def two_forwards():
    """Two passes, one backward: gradients are exchanged once; a failed backward leaves no trace."""
    device, rank = here()
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
    runtime.run_pending()
    return len(counts), module.always.grad.tolist()


def fail(gradient):
    raise RuntimeError("on purpose")


def test_two_forwards_and_a_failed_backward():
    assert spawned(2, two_forwards) == [(1, [3.0, 3.0])] * 2


class Lopsided(torch.nn.Module):
    """The same on all devices; made in another order, of views, and used otherwise on rank 1."""

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__()
        base = torch.arange(12.0).to(device)
        late = torch.nn.Parameter(torch.ones(3, device=device)) if rank == 1 else None
        self.first = torch.nn.Parameter(base.reshape(3, 4) + 0 if rank else base.view(3, 4))
        self.second = late if rank == 1 else torch.nn.Parameter(torch.ones(3, device=device))
        flags = torch.tensor([True, False])
        self.register_buffer("flags", (flags.to(device) if rank else ~flags.to(device)))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.first
        return y.sum() if self.rank == 1 else y.sum() + self.second.sum()


def lopsided(nprocs_per_node: int, options: dict):
    device, rank = here()
    options = dict(options)
    if "keep" in options:
        nodes = torch_xla.runtime.world_size() // nprocs_per_node
        options["mixing"] = topology.self_weighted(options.pop("keep")[:nodes])
    net = SlowMoDistributedDataParallel(
        Lopsided(rank, device), nprocs_per_node, slowmo_frequency=4, **options
    )
    params = list(net.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    for t in range(8):
        net(torch.full((2, 3), 1.0 + t).to(device)).backward()
        if rank == 0:
            optimizer.step()
        else:  # the same, traced otherwise
            with torch.no_grad():
                for p in params:
                    if p.grad is not None:
                        p.sub_(p.grad * 0.1)
        net.zero_grad(set_to_none=t % 2 == 0)
        net.perform_slowmo(optimizer)
    return values(net.module)


@pytest.mark.parametrize("nprocs_per_node", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"localsgd_frequency": 2},
        {"slowmo_base_algorithm": "sgp", "slowmo_memory_efficient": False},
        {"slowmo_base_algorithm": "sgp", "keep": [0.6, 0.3, 0.5, 0.7]},
    ],
)
def test_devices_may_trace_their_own_steps_differently(nprocs_per_node, options):
    """Only the exchange must be the same on all: otherwise devices wait for each other."""
    results = spawned(4, lopsided, nprocs_per_node, options)
    for result in results[1:]:
        assert set(result) == {"first", "second", "flags"}
        if "memory" not in str(options):
            np.testing.assert_allclose(result["second"], results[0]["second"], rtol=1e-5)


def one_parameter(options: dict):
    """What is kept for slow momentum must survive in-place optimizers."""
    device, rank = here()
    module = torch.nn.Linear(5, 1, bias=False).to(device)
    torch.nn.init.constant_(module.weight, 1.0)
    net = SlowMoDistributedDataParallel(
        module, nprocs_per_node=1, slowmo_frequency=2, localsgd_frequency=1, **options
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for t in range(6):
        net(torch.full((2, 5), 0.1 * (rank + t)).to(device)).sum().backward()
        optimizer.step()
        net.zero_grad()
        net.perform_slowmo(optimizer)
        runtime.run_pending()
        if t % 2:
            anchor = net.old_params.cpu().numpy()
            assert np.isfinite(anchor).all()
    return module.weight.detach().cpu().numpy().ravel(), anchor


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_a_module_of_one_parameter(world, whole):
    results = spawned(world, one_parameter, {"slowmo_memory_efficient": not whole})
    weight = results[0][0]
    for rank, (_, anchor) in enumerate(results):
        part = weight if whole or world == 1 else weight[3 * rank : 3 * rank + 3]
        np.testing.assert_allclose(anchor[: part.size], part, rtol=1e-6)


def members():
    """With two levels processes of a node hold the same bits after every kind of step."""
    device, rank = here()
    net = SlowMoDistributedDataParallel(
        Perceptron(8, 6).to(device), 2, slowmo_base_algorithm="sgp", slowmo_frequency=4
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    history = []
    for t in range(6):
        x = torch.full((3, 8), 0.1 * (rank + t)).to(device)
        (net(x) ** 2).sum().backward()
        optimizer.step()
        net.zero_grad()
        net.perform_slowmo(optimizer)
        history.append(values(net.module)["w1"])
    return history


def test_members_of_a_node_agree():
    a, b, c, d = spawned(4, members)
    assert all(map(np.array_equal, a, b))
    assert all(map(np.array_equal, c, d))
    assert np.array_equal(a[3], c[3]), "a slow step makes all equal"
    assert np.isfinite(a[-1]).all()


# One device: errors and warnings.
