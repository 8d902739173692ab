"""Half precision with float32 masters: forms, error feedback, slow momentum on the masters."""

import numpy as np
import pytest
import slowmo_here as here
import torch
from slowmo_spawned import spawned

from torch_compat.slowmo import SlowMoDistributedDataParallel
from torch_compat.slowmo._half import Masters

SHAPES = [(3, 5), (4,), (2, 2)]


def module_of(dtype: torch.dtype) -> torch.nn.Module:
    rng = np.random.default_rng(0)
    params = [torch.tensor(rng.normal(size=shape), dtype=dtype) for shape in SHAPES]
    return torch.nn.ParameterList([torch.nn.Parameter(p) for p in params])


class Prescribed(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.values = module_of(dtype)

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
    net = SlowMoDistributedDataParallel(module, nprocs_per_node=1, **options)
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
        here.launch()
    whole = torch.cat([m.detach().reshape(-1) for m in masters])
    half = torch.cat([p.detach().float().reshape(-1) for p in params])
    here.launch()
    return whole.cpu().numpy(), half.cpu().numpy()


def trained_all(runs: list[tuple[str, torch.dtype, dict]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Several in one start of the runtime."""
    return [trained(*run) for run in runs]


LOCAL = {"localsgd_frequency": 2, "slowmo_frequency": 4}
CASES = {
    "local sgd": {"localsgd_frequency": 2, "slowmo_momentum": 0.0},
    "slowmo": LOCAL,
    "slowmo whole": {**LOCAL, "slowmo_memory_efficient": False},
    "sgp": {"slowmo_base_algorithm": "sgp", "slowmo_momentum": 0.0},
}


@pytest.mark.parametrize("case", CASES)
def test_forms_give_the_same(case):
    forms = ("tensor", "dict", "list", "flat list")
    runs = [(form, torch.bfloat16, CASES[case]) for form in forms]
    for (expected, expected_half), *others in spawned(2, trained_all, runs):
        for form, (master, half) in zip(forms[1:], others, strict=True):
            np.testing.assert_allclose(master, expected, rtol=1e-6, atol=1e-6, err_msg=form)
            np.testing.assert_allclose(half, expected_half, rtol=1e-2, err_msg=form)


@pytest.mark.parametrize("case", CASES)
def test_masters_follow_training_in_full_precision(case):
    """Within the rounding of what is exchanged, and of initial values and gradients."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    results = spawned(2, trained_all, [("list", dtype, CASES[case]) for dtype in dtypes])
    for (expected, _), *halves in results:
        for dtype, (master, rounded) in zip(dtypes[1:], halves, strict=True):
            unit = torch.finfo(dtype).eps
            np.testing.assert_allclose(master, expected, rtol=4 * unit, atol=4 * unit)
            np.testing.assert_allclose(rounded, master, rtol=unit, atol=unit)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(22), r"as one tensor must have the elements of all parameters, 23, got 22"),
        ([torch.zeros(15)], r"as a list must have one tensor per parameter of the module, 3, got"),
        ([torch.zeros(15), torch.zeros(3), torch.zeros(4)], r"\[1\] must have the 4 elements"),
        ([torch.zeros(15), torch.zeros(4), torch.zeros(4).double()], r"must be float32, got .* 2"),
        ({0: torch.zeros(23), 1: torch.zeros(23)}, r"as a dict must have one entry, got 2"),
        ({}, r"as a dict must have one entry, got 0"),
        ("masters", r"must be a tensor, a list of tensors, or a dict .* got str"),
        ([1, 2, 3], r"must be a tensor, a list of tensors, or a dict .* got list"),
    ],
)
def test_refused(given, message):
    with pytest.raises(ValueError, match=r"`fp32_params`.*" + message):
        Masters(list(module_of(torch.float16)), given)
