"""The wrapper in a script: calls in the wrong order, no backward pass, nodes of two."""

import copy
import warnings

import numpy as np
import slowmo_here as here
import torch
from slowmo_models import Perceptron, train_step, values
from slowmo_spawned import spawned

from torch_compat.slowmo import SlowMoDistributedDataParallel


def messages(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except ValueError as error:
            return [f"ValueError: {error}"]
    return [str(w.message) for w in caught if w.category is UserWarning]


def one_device_troubles() -> dict[str, list[str]]:
    device = here.device()

    def built(module=None, **options):
        module = module or torch.nn.Linear(2, 2).to(device)
        net = SlowMoDistributedDataParallel(
            module, nprocs_per_node=1, slowmo_frequency=2, **{"localsgd_frequency": 1, **options}
        )
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    def step(net, optimizer, **options):
        net(torch.ones(1, 2, dtype=next(net.parameters()).dtype).to(device)).sum().backward()
        net.perform_slowmo(optimizer, **options)

    found = {}
    elsewhere = torch.nn.Linear(2, 2, device="meta")
    net, optimizer = built(torch.nn.Sequential(torch.nn.Linear(2, 2).to(device), elsewhere))
    found["elsewhere"] = messages(lambda: net(torch.ones(1, 2)))
    net, optimizer = built()
    found["no forward"] = messages(lambda: net.perform_slowmo(optimizer))
    found["no forward again"] = messages(lambda: net.perform_slowmo(optimizer))
    net, optimizer = built()
    net.eval()
    found["eval only"] = messages(lambda: step(net, optimizer))
    net, optimizer = built()
    found["fine"] = messages(lambda: step(net, optimizer))
    found["no optimizer"] = messages(lambda: net.perform_slowmo(None))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device=device))]})
    found["more parameters"] = messages(lambda: net.perform_slowmo(optimizer))
    net, optimizer = built()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device=device))]})
    found["others"] = messages(lambda: step(net, optimizer))
    net, optimizer = built()
    del optimizer.param_groups[0]["lr"]
    found["no rate"] = messages(lambda: step(net, optimizer))
    net, optimizer = built(torch.nn.Linear(2, 2).to(device, torch.bfloat16))
    found["half"] = messages(lambda: step(net, optimizer))
    net, optimizer = built(torch.nn.Linear(2, 2).to(device, torch.bfloat16), slowmo_momentum=0.0)
    found["half without masters"] = messages(lambda: step(net, optimizer))
    found["half without masters again"] = messages(lambda: step(net, optimizer))
    return found


def test_troubles(by):
    (found,) = spawned(1, one_device_troubles, by=by)
    for key, expected in {
        "elsewhere": "ValueError: `module` must have all its parameters on ",
        "no forward": "Slow momentum is anchored at the parameters of this moment",
        "eval only": "Slow momentum is anchored at the parameters of this moment",
        "no optimizer": "ValueError: `optimizer` must be a torch optimizer that holds parameters",
        "more parameters": "ValueError: `optimizer` must hold the parameters that slow momentum",
        "others": "`optimizer` holds parameters that are not those of the module",
        "no rate": "ValueError: `optimizer.param_groups[0]` must have a learning rate",
        "half": "ValueError: `optimizer` must hold float32 parameters under slow momentum",
        "half without masters": "Set `fp32_params` in perform_slowmo()",
    }.items():
        assert len(found[key]) == 1, (key, found[key])
        assert found[key][0].startswith(expected), (key, found[key])
    for key in ("fine", "no forward again", "half without masters again"):
        assert found[key] == [], key


def members():
    """With two levels processes of a node hold the same bits after every kind of step."""
    device, rank = here.device(), here.rank()
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


def test_members_of_a_node_agree(by):
    a, b, c, d = spawned(4, members, by=by)
    assert all(map(np.array_equal, a, b))
    assert all(map(np.array_equal, c, d))
    assert np.array_equal(a[3], c[3]), "a slow step makes all equal"
    assert np.isfinite(a[-1]).all()


def copied():
    """A copy trains on in the same run, by itself."""
    net = SlowMoDistributedDataParallel(
        Perceptron(8, 6).to(here.device()), nprocs_per_node=1, localsgd_frequency=1
    )
    first = values(net.module)["w1"]
    again = copy.deepcopy(net)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.5)
    train_step(again, optimizer, 0, 8)
    return first, values(net.module)["w1"], values(again.module)["w1"]


def test_a_copy(by):
    results = spawned(2, copied, by=by)
    for before, kept, trained in results:
        assert np.array_equal(before, kept)
        assert not np.array_equal(kept, trained)
    assert np.array_equal(results[0][2], results[1][2])
