"""Sums of losses and gradients over eight devices, against plain torch."""

import jax
import pytest
import torch
from torch import nn

from torch_compat.on_jax.device_process._mesh_program import MeshProgram

COUNT = 8


class Scaled(nn.Module):
    """With a frozen and a half-precision parameter, a buffer, and a number in the batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.linear.bias.requires_grad_(False)
        self.small = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x, scale=1.0):
        self.seen += x.shape[0]
        return ((self.linear(x) * self.small.float()).square().mean() * scale,)


def program(module: nn.Module, micro_batches: int = 1, compress: bool = False) -> MeshProgram:
    return MeshProgram(
        module, jax.devices(), seed_base=0, micro_batches=micro_batches, compress=compress
    )


def expected(module: nn.Module, batches: list[dict]) -> tuple[float, list[torch.Tensor]]:
    module.zero_grad()
    loss = sum(module(**batch)[0] for batch in batches) / len(batches)
    loss.backward()
    return loss.item(), [module.linear.weight.grad, module.small.grad]


def check(found: MeshProgram, module: nn.Module, batches: list[dict], tolerance: float = 1e-6):
    loss, gradients = found.exchange()
    wanted, (weight, half) = expected(module, batches)
    assert loss == pytest.approx(wanted, abs=1e-6)
    by_name = dict(zip([n for n, _ in module.named_parameters()], gradients, strict=True))
    torch.testing.assert_close(by_name["linear.weight"], weight, rtol=tolerance, atol=tolerance)
    assert not by_name["linear.bias"].any()
    assert by_name["small"].dtype == torch.float32
    torch.testing.assert_close(by_name["small"], half.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("compress", [False, True])
def test_mean_over_devices_and_micro_batches(compress: bool):
    module = Scaled()
    ours = program(module, micro_batches=2, compress=compress)
    batches = [{"x": torch.randn(2, 4)} for _ in range(2 * COUNT)]
    for _ in range(2):  # sums start anew
        ours.add(batches[:COUNT])
        ours.add(batches[COUNT:])
        check(ours, module, batches, 2**-7 if compress else 1e-6)
    assert ours.gradient_bytes == (12 + 3) * (2 if compress else 4) + 4
    (seen,) = ours.buffers(["seen"])
    assert seen.dtype == torch.int64
    assert int(seen) == 8


def test_other_parameters():
    module, other = Scaled(), Scaled()
    ours = program(module)
    ours.load([*other.parameters(), *other.buffers()])
    batches = [{"x": torch.randn(1, 4)} for _ in range(COUNT)]
    ours.add(batches)
    check(ours, other, batches)


def test_devices_with_batches_of_their_own_kind():
    module = Scaled()
    ours = program(module)
    batches = [{"x": torch.randn(1 + i % 2, 4), "scale": float(1 + i % 3)} for i in range(COUNT)]
    ours.add(batches)
    check(ours, module, batches)
    (seen,) = ours.buffers(["seen"])
    assert int(seen) == 1


def test_integers_that_do_not_fit():
    with pytest.raises(ValueError, match="with values that jax's 32 bits do not hold"):
        program(Scaled()).add([torch.tensor([2**31])] * COUNT)
