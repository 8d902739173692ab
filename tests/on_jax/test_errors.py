"""What torchax and jax cannot do is one sentence: the layer, the operation, what to do instead."""

from collections.abc import Callable

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, rnn

from torch_compat import on_jax

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


class Calls(nn.Module):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self.linear(x))


def inside(layer):
    """The layer as `outer.0.1` of a module."""
    module = nn.Module()
    module.outer = nn.Sequential(nn.Sequential(nn.Identity(), layer))
    module.forward = lambda x: module.outer(x)
    return module


def error_of(module, loss=lambda module, x: (module(x) ** 2).mean()):
    loss_fn, params, state = on_jax.as_loss(module, loss)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        jax.jit(loss_fn)(params, X, rng=jax.random.key(0), model_state=state)
    return caught.value


class Packs(nn.LSTM):
    def forward(self, x):
        lengths = torch.full((1,), x.shape[0])
        return super().forward(rnn.pack_padded_sequence(x[:, None], lengths))[0].data


class Looks(nn.Embedding):
    def forward(self, x):
        return super().forward(x.abs().long().clamp(0, 3))


def ctc(x):
    lengths = torch.tensor([4]), torch.tensor([2])
    return F.ctc_loss(x[:, None].log_softmax(-1), torch.tensor([[1, 2]]), *lengths)


LACKING = {
    "packed": (lambda: Packs(8, 8), "aten._pack_padded_sequence", "padded sequences"),
    "max_norm": (
        lambda: Looks(4, 8, max_norm=1.0),
        "aten.embedding_renorm_",
        "leave `max_norm` out",
    ),
    "boolean index": (
        lambda: Calls(lambda x: x[x > 0]),
        "Tensor.__getitem__",
        "torch.where(mask, x, 0)",
    ),
    "masked_select": (
        lambda: Calls(lambda x: x.masked_select(x > 0)),
        "aten.masked_select",
        "torch.where",
    ),
    "nonzero": (lambda: Calls(lambda x: x[x.nonzero()]), "aten.nonzero", "torch.where"),
    "unique": (lambda: Calls(lambda x: x.unique()), "aten._unique2", "F.one_hot"),
    "CTC": (lambda: Calls(ctc), "aten._ctc_loss", "another loss"),
    "if": (lambda: Calls(lambda x: x if x.any() else -x), "(`if`, `.item()`", "torch.where"),
    "item": (lambda: Calls(lambda x: x * x.sum().item()), "aten._local_scalar_dense", "metric"),
    "tolist": (lambda: Calls(lambda x: x * x[0, 0].tolist()), "Tensor.tolist", "metric"),
    "numpy": (lambda: Calls(lambda x: x * x.detach().numpy()), "Tensor.numpy", "metric"),
    "slice": (lambda: Calls(lambda x: x[: x.sum()]), "aten._local_scalar_dense", "metric"),
    "no gradient": (
        lambda: Calls(lambda x: torch.poisson(x.abs())),
        "aten.poisson",
        "draw with torch.rand",
    ),
    "another": (
        lambda: Calls(lambda x: F.adaptive_max_pool2d(x[None], 3)),
        "aten.adaptive_max_pool2d",
        "write it with other operations, or train with torch itself or torch_xla",
    ),
}


@pytest.mark.parametrize("case", LACKING)
def test_what_has_no_form_names_the_layer_and_what_to_do(case):
    make, operation, instead = LACKING[case]
    layer = make()
    error = error_of(inside(layer))
    assert type(error) is ValueError
    message = str(error)
    kind = type(layer).__name__
    assert message.startswith(f"Layer `outer.0.1` ({kind}) uses "), message
    assert operation in message
    assert instead in message
    assert len(message) < 300
    assert "\n" not in message
    assert error.__cause__ is not None


def test_layers_of_torch_and_the_whole_module():
    module = inside(parametrizations.orthogonal(nn.Linear(8, 4), orthogonal_map="householder"))
    loss_fn, params, state = on_jax.as_loss(module, lambda m, x: m(x).sum())
    message = r"Layer `outer\.0\.1\.parametrizations\.weight\.0` .*orthogonal_map=\"matrix_exp\""
    with pytest.raises(ValueError, match=message):
        jax.grad(loss_fn, has_aux=True)(params, X, model_state=state)
    embeds = nn.Embedding(4, 8, max_norm=1.0)
    message = str(error_of(embeds, lambda m, x: m(x.abs().long().clamp(0, 3)).sum()))
    assert message.startswith("The module (nn.Embedding) uses aten.embedding_renorm_")
    message = str(error_of(nn.Linear(8, 8), lambda m, x: m(x) if x.any() else x))
    assert message.startswith("The loss function uses aten._local_scalar_dense")


SHAPES = {
    "matmul": lambda x: x @ torch.ones(3, 3),
    "broadcast": lambda x: x + torch.ones(3),
    "linear": lambda x: F.linear(x, torch.ones(8, 3)),
    "reshape": lambda x: x.reshape(3, 7),
    "cat": lambda x: torch.cat([x, torch.ones(3, 3)]),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_that_do_not_match_are_torchs_own_error(case):
    error = error_of(Calls(SHAPES[case]))
    assert type(error) is RuntimeError
    assert "form in jax" not in str(error)
    assert any(size in str(error) for size in ("3", "7"))


def raised(error):
    raise error


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyError("mine"), TypeError("mine")])
def test_errors_of_the_module_stay(error):
    assert error_of(Calls(lambda x: raised(error))) is error
