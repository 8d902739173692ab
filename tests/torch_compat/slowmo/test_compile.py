"""`torch.compile` of a wrapper: what it exchanges stays outside of the compiled graphs."""

import copy

import numpy as np
import slowmo_here as here
import torch
import torch._dynamo
from slowmo_spawned import spawned

from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo


def trained(compiles: bool):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh())
    options = {"slowmo_frequency": 3, "slowmo_base_algorithm": "sgp"}
    net = SlowMo(module, nprocs_per_node=2, **options)
    called = torch.compile(net, backend="aot_eager") if compiles else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + here.rank())
        called(torch.randn(5, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        net.zero_grad(set_to_none=True)
        net.perform_slowmo(optimizer)
    inside = SlowMo(torch.compile(module, backend="eager"), nprocs_per_node=2)
    copy.deepcopy(module).load_state_dict(inside.consolidated_state_dict(), strict=True)
    return [param.detach().numpy() for param in module.parameters()]


def compiled_and_not():
    torch._dynamo.config.error_on_recompile = True  # the same graphs in every step
    return trained(True), trained(False)


def test_a_compiled_wrapper_trains_as_without():
    for compiled, plain in spawned(4, compiled_and_not):
        for mine, other in zip(compiled, plain, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
