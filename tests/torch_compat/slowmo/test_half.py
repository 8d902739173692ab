"""Half precision with float32 masters: forms, error feedback, slow momentum on the masters."""

import numpy as np
import slowmo_here as here
import torch
from slowmo_spawned import spawned

from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

SHAPES = [(3, 5), (4,), (2, 2)]


class Prescribed(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        params = [torch.tensor(rng.normal(size=shape), dtype=dtype) for shape in SHAPES]
        self.values = torch.nn.ParameterList(params)

    def forward(self, rate: torch.Tensor) -> torch.Tensor:
        return sum((p * rate * (i + 1)).sum() for i, p in enumerate(self.values))


def trained(form: str, dtype: torch.dtype, options: dict) -> tuple[np.ndarray, np.ndarray]:
    device, rank = here.device(), here.rank()
    module = Prescribed(dtype).to(device)
    params = list(module.values)
    sizes = [p.numel() for p in params]
    masters = [torch.nn.Parameter(p.detach().float() + 0) for p in params]
    if form in ("tensor", "dict"):
        masters = [torch.nn.Parameter(torch.cat([m.detach().reshape(-1) for m in masters]))]
    elif form == "flat list":
        masters = [torch.nn.Parameter(m.detach().reshape(-1) + 0) for m in masters]
    given = {"tensor": masters[0], "dict": {0: masters[0]}}.get(form, masters)
    net = SlowMo(module, nprocs_per_node=1, **options)
    optimizer = torch.optim.SGD(masters, lr=0.05, momentum=0.9)
    for t in range(9):
        rate = torch.tensor([0.3 * (rank + 1) - 0.1 * t], dtype=dtype).to(device)
        net(rate).backward()
        grads = torch.cat([p.grad.float().reshape(-1) for p in params])
        for master, part in zip(masters, grads.split([m.numel() for m in masters]), strict=True):
            master.grad = part.reshape(master.shape)
        optimizer.step()
        flat = torch.cat([m.detach().reshape(-1) for m in masters])
        with torch.no_grad():
            for p, part in zip(params, flat.split(sizes), strict=True):
                p.copy_(part.reshape(p.shape))
        net.zero_grad()
        optimizer.zero_grad()
        net.perform_slowmo(optimizer, fp32_params=given)
    whole = torch.cat([m.detach().reshape(-1) for m in masters])
    return whole.numpy(), torch.cat([p.detach().float().reshape(-1) for p in params]).numpy()


LOCAL = {"localsgd_frequency": 2, "slowmo_frequency": 4}
CASES = {
    "slowmo": LOCAL,
    "slowmo whole": {**LOCAL, "slowmo_memory_efficient": False},
    "sgp": {"slowmo_base_algorithm": "sgp", "slowmo_momentum": 0.0},
}
FORMS = ("list", "flat list", "tensor", "dict")
RUNS = [(form, torch.bfloat16) for form in FORMS] + [("list", torch.float32)]
RUNS += [("list", torch.float16)]


def trained_all():
    return [[trained(*run, options) for run in RUNS] for options in CASES.values()]


def test_masters_of_any_form_follow_training_in_full_precision():
    """Within the rounding of what is exchanged, and of initial values and gradients."""
    for result in spawned(2, trained_all):
        for runs in result:
            expected, _ = runs[RUNS.index(("list", torch.float32))]
            for (_, dtype), (master, rounded) in zip(RUNS, runs, strict=True):
                unit = torch.finfo(dtype).eps
                if dtype != torch.float32:
                    np.testing.assert_allclose(master, expected, rtol=4 * unit, atol=4 * unit)
                    np.testing.assert_allclose(rounded, master, rtol=unit, atol=unit)
            for (master, half), form in zip(runs[1:4], FORMS[1:], strict=True):
                np.testing.assert_allclose(master, runs[0][0], rtol=1e-6, atol=1e-6, err_msg=form)
                np.testing.assert_allclose(half, runs[0][1], rtol=1e-2, err_msg=form)
