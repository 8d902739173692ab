"""FairScale's settings in the processes of a test."""

from typing import Any

import numpy as np
import slowmo_here as here
import torch
from fairscale_settings import SETTINGS, Setting, initial, loss_of, make_net, samples
from slowmo_models import take_step
from torch.nn.utils import vector_to_parameters

from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo


def run_all() -> dict[str, dict[str, Any]]:
    """Every setting on this process: whether slow momentum is on, parameters [steps, 720]."""
    return {name: run(setting) for name, setting in SETTINGS.items()}


def run(setting: Setting) -> dict[str, Any]:
    device, rank, world = here.device(), here.rank(), here.world()
    module = make_net()
    vector_to_parameters(initial(), module.parameters())
    net = wrapped(module.to(device), setting.options)
    optimizer = torch.optim.SGD(net.module.parameters(), lr=1, momentum=0)
    if setting.anchors_first:
        net._init_global_momentum_buffers(optimizer)
    history = []
    for step in range(setting.steps):
        x, y = (part[rank : rank + 1].to(device) for part in samples(step, world))
        take_step(net, optimizer, loss_of(net, x, y))
        params = [p.detach().cpu().numpy().ravel() for p in net.module.parameters()]
        history.append(np.concatenate(params))
    return {"slowmo": net.slowmo, "params": np.stack(history)}


def wrapped(module: torch.nn.Module, options: dict[str, Any]) -> SlowMo:
    """With the arguments that all of FairScale's tests give besides."""
    return SlowMo(
        module,
        comm_device=here.device(),
        process_rank=here.rank(),
        process_world_size=here.world(),
        **options,
    )
