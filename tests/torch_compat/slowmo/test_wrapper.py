"""The wrapper in a script: calls in the wrong order, no backward pass."""

import warnings

import slowmo_here as here
import torch
from slowmo_spawned import spawned

from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo


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
        net = SlowMo(
            module, nprocs_per_node=1, slowmo_frequency=2, **{"localsgd_frequency": 1, **options}
        )
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    def add(optimizer):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device=device))]})

    def step(net, optimizer):
        net(torch.ones(1, 2, dtype=next(net.parameters()).dtype).to(device)).sum().backward()
        net.perform_slowmo(optimizer)

    found = {}
    net, optimizer = built()
    found["no forward"] = messages(lambda: net.perform_slowmo(optimizer))
    found["no forward again"] = messages(lambda: net.perform_slowmo(optimizer))
    net, optimizer = built()
    net.eval()
    found["eval only"] = messages(lambda: step(net, optimizer))
    net, optimizer = built()
    found["fine"] = messages(lambda: step(net, optimizer))
    add(optimizer)
    found["more parameters"] = messages(lambda: net.perform_slowmo(optimizer))
    found["more parameters again"] = messages(lambda: net.perform_slowmo(optimizer))
    net, optimizer = built()
    optimizer.param_groups[0]["lr"] = None  # as Adafactor's with relative_step
    found["no rate"] = messages(lambda: step(net, optimizer))
    light = torch.nn.Linear(2, 2).to(device, torch.bfloat16)
    net, optimizer = built(light)
    found["half"] = messages(lambda: step(net, optimizer))
    net, optimizer = built(light, slowmo_momentum=0.0)
    found["half without masters"] = messages(lambda: step(net, optimizer))
    return found


# The argument, or what else the only message must name.
TROUBLES = {
    "no forward": "anchored at the present parameters",
    "eval only": "anchored at the present parameters",
    "more parameters": "`optimizer` holds 1",
    "no rate": "ValueError: `optimizer`",
    "half": "ValueError: `optimizer` must hold float32",
    "half without masters": "`fp32_params`",
}


def test_troubles(by):
    (found,) = spawned(1, one_device_troubles, by=by)
    for key, messages in found.items():
        assert len(messages) == (key in TROUBLES), (key, messages)
        assert all(TROUBLES[key] in message for message in messages), (key, messages)
    assert found.keys() > TROUBLES.keys()
