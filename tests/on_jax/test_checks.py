"""Modules that jax cannot hold are refused, with every tensor that it cannot."""

import jax
import pytest
import torch
from torch import nn

from torch_compat import on_jax


def loss(module, batch):
    return module(batch).mean()


def with_buffer(value):
    module = nn.Linear(2, 2)
    module.register_buffer("extra", value)
    return module


def sparse():
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.eye(2).to_sparse())
    return module


def complex_numbers():
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.eye(2, dtype=torch.complex64))
    return module


class Own(torch.Tensor):
    pass


def of_own_type():
    module = nn.Linear(2, 2)
    module.register_buffer("extra", torch.ones(2).as_subclass(Own))
    return module


REFUSED = {
    "must be a torch.nn.Module, got function": lambda: loss,
    "must be a torch.nn.Module, got dict": dict,
    "weight is on the meta device": lambda: nn.Linear(2, 2, device="meta"),
    "weight is torch.float64 .*; bias is torch.float64": lambda: nn.Linear(2, 2).double(),
    "weight has no shape yet": lambda: nn.LazyLinear(2),
    "running_mean has no shape yet": nn.LazyBatchNorm1d,
    r"weight has the layout torch.sparse_coo": sparse,
    "weight is torch.complex64, and only floating": complex_numbers,
    "extra is a Own, not a plain tensor": of_own_type,
    "extra is torch.complex128 and would lose": lambda: with_buffer(
        torch.ones(2, dtype=torch.complex128)
    ),
    "extra is torch.int64 and would lose": lambda: with_buffer(torch.tensor([1, 2**31])),
    "extra is torch.float4_e2m1fn_x2, a dtype": lambda: with_buffer(
        torch.empty(2, dtype=torch.float4_e2m1fn_x2)
    ),
    "is a OptimizedModule.*`module._orig_mod`": lambda: torch.compile(
        nn.Linear(2, 2), backend="eager"
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_jax_cannot_hold_is_named(message):
    module = REFUSED[message]()
    with pytest.raises(ValueError, match=f"as_loss: .*{message}"):
        on_jax.as_loss(module, loss)
    with pytest.raises(ValueError, match=f"as_apply: .*{message}"):
        on_jax.as_apply(module)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:FutureWarning")
def test_torchscript():
    with pytest.raises(ValueError, match="compiled by TorchScript"):
        on_jax.as_loss(torch.jit.script(nn.Linear(2, 2)), loss)


def test_64_bits_where_jax_has_them():
    with jax.enable_x64(True):
        _, params, state = on_jax.as_loss(
            with_buffer(torch.tensor([2**40])).to(torch.float64), loss
        )
    assert params["weight"].dtype == "float64"
    assert state["extra"].tolist() == [2**40]


@pytest.mark.parametrize("given", [None, "mean", 3])
def test_a_loss_must_be_callable(given):
    with pytest.raises(ValueError, match="`loss` must be callable"):
        on_jax.as_loss(nn.Linear(2, 2), given)
