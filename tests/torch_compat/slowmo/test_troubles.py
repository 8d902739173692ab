"""Calls in the wrong order, at rates of zero, without a backward pass: clear answers."""

import warnings

import numpy as np
import torch
import torch_xla
import torch_xla.debug.metrics as met
from slowmo_models import Perceptron
from slowmo_spawned import spawned

from torch_compat import runtime
from torch_compat.slowmo import SlowMoDistributedDataParallel


def here() -> tuple[torch.device, int]:
    return torch_xla.device(), torch_xla.runtime.global_ordinal()


def messages(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except ValueError as error:
            return [f"ValueError: {error}"]
    return [str(w.message) for w in caught if w.category is UserWarning]


def one_device_troubles() -> dict[str, list[str]]:
    device, _ = here()

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
    net, optimizer = built(torch.nn.Linear(2, 2))
    found["host"] = messages(lambda: net(torch.ones(1, 2)))
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
    step(net, optimizer)
    found["no rate"] = messages(lambda: step(net, optimizer))
    net, optimizer = built(torch.nn.Linear(2, 2).to(device, torch.bfloat16))
    found["half"] = messages(lambda: step(net, optimizer))
    net, optimizer = built(torch.nn.Linear(2, 2).to(device, torch.bfloat16), slowmo_momentum=0.0)
    found["half without masters"] = messages(lambda: step(net, optimizer))
    found["half without masters again"] = messages(lambda: step(net, optimizer))
    return found


def test_troubles():
    (found,) = spawned(1, one_device_troubles)
    for key, expected in {
        "host": "ValueError: `module` must have all its parameters on the device of this process",
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


def rates_of_zero():
    """Warm-up from 0 and decay to 0, at slow steps (FairScale divides by them)."""
    device, _ = here()
    module = Perceptron(2, 2).to(device)
    net = SlowMoDistributedDataParallel(module, nprocs_per_node=1, slowmo_frequency=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    seen = []
    for rate in (0.0, 0.1, torch.tensor(0.0), 0.0, 0.1):
        optimizer.param_groups[0]["lr"] = rate
        net(torch.ones(1, 2).to(device)).sum().backward()
        optimizer.step()
        net.zero_grad()
        net.perform_slowmo(optimizer)
        runtime.run_pending()
        seen.append(torch.cat([p.detach().cpu().reshape(-1) for p in net.parameters()]))
    assert torch.isfinite(net.global_momentum_buffer.cpu()).all()
    return torch.stack(seen).numpy()


def test_a_rate_of_zero_at_a_slow_step():
    for seen in spawned(2, rates_of_zero):
        assert np.isfinite(seen).all()
        np.testing.assert_array_equal(seen[2], seen[1])
        np.testing.assert_array_equal(seen[3], seen[2])
        assert np.abs(seen[1] - seen[0]).max() > 0.05
        assert np.abs(seen[4] - seen[3]).max() > 0.05


def idle_forward():
    """Without buffers, masters or slow momentum a forward pass launches nothing of its own."""
    device, _ = here()
    module = torch.nn.Linear(2, 2).to(device)
    net = SlowMoDistributedDataParallel(module, nprocs_per_node=1, slowmo_momentum=0.0)
    runtime.run_pending()
    before = met.metric_data("ExecuteTime")
    net(torch.ones(1, 2).to(device))
    return met.metric_data("ExecuteTime") == before


def test_a_forward_pass_alone():
    assert spawned(1, idle_forward) == [True]
