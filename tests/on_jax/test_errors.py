"""What is refused: results of a loss, modules that jax cannot hold, operations without a form."""

from collections.abc import Callable
from functools import partial

import jax
import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, rnn
from torch.utils.checkpoint import checkpoint

from support.refusals import Refusal, each
from torch_compat import on_jax

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
OUTSIDE = torch.zeros(4, 8)


def run(loss, module=None):
    loss_fn, params, state = on_jax.as_loss(nn.Linear(8, 8) if module is None else module, loss)
    return jax.jit(loss_fn)(params, X, model_state=state)


def autocasting(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m(x).mean()


def written_view(m, x):
    OUTSIDE[1:][0] = 1.0
    return (m(x) + OUTSIDE).mean()


# What a loss does, and what the message names.
LOSSES = {
    "no scalar": (lambda m, x: m(x), "shape (4, 8)"),
    "a metric of many": (lambda m, x: (m(x).mean(), {"y": m(x)}), "'y'"),
    "a reentrant checkpoint": (
        lambda m, x: checkpoint(m, x, use_reentrant=True).mean(),
        "use_reentrant=False",
    ),
    "autocast": (autocasting, "torch.autocast"),
    "a generator": (lambda m, x: torch.rand(8, generator=torch.Generator()), "torch.Generator"),
    "no key": (lambda m, x: F.dropout(m(x)).mean(), "key"),
    "a write into a view from outside": (written_view, "outside"),
    "a function of jax": (lambda m, x: on_jax.as_apply(nn.ReLU())({}, {}, X), "call the module"),
}
# Modules, and the tensor that the message names with why.
LARGE = nn.Linear(2, 2)
LARGE.register_buffer("extra", torch.tensor([1, 2**31]))
MODULES = {
    "no values": (nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
    "64 bits": (nn.Linear(2, 2).double(), "bias is torch.float64"),
    "compiled": (torch.compile(nn.Linear(2, 2), backend="eager"), "`module._orig_mod`"),
    "a large integer": (LARGE, "torch.int64"),
}


def with_other_names():
    loss_fn, params, state = on_jax.as_loss(nn.BatchNorm1d(8), models.loss)
    loss_fn({"other": params["weight"], "bias": params["bias"]}, X, model_state=state)


ROWS = {
    **{f"a loss with {k}": Refusal(partial(run, loss), said) for k, (loss, said) in LOSSES.items()},
    **{
        f"a module, {name}": Refusal(partial(run, models.loss, module), "as_loss: ", said)
        for name, (module, said) in MODULES.items()
    },
    "other names": Refusal(with_other_names, "`params`", "unknown ['other']"),
}


@each(ROWS)
def test_refused(refusal):
    refusal.check()
    assert not OUTSIDE.any()


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
        jax.jit(jax.grad(loss_fn, has_aux=True))(
            params, X, rng=jax.random.key(0), model_state=state
        )
    return caught.value


class Packs(nn.LSTM):
    def forward(self, x):
        lengths = torch.full((1,), x.shape[0])
        return super().forward(rnn.pack_padded_sequence(x[:, None], lengths))[0].data


# Layers, or functions in one, the operation, and what to do instead.
LACKING = {
    "packed": (Packs(8, 8), "aten._pack_padded_sequence", "padded sequences"),
    "boolean index": (lambda x: x[x > 0], "aten.index", "torch.where(mask, x, 0)"),
    "if": (lambda x: x if x.any() else -x, "(`if`, `.item()`", "torch.where"),
    "numpy": (lambda x: x * x.detach().numpy(), "Tensor.numpy", "metric"),
    "another": (
        lambda x: x.index_reduce(0, torch.tensor([0]), x[:1], "prod"),
        *("aten.index_reduce", "other operations"),
    ),
}


@pytest.mark.parametrize("case", LACKING)
def test_what_has_no_form_names_the_layer_and_what_to_do(case):
    layer, operation, instead = LACKING[case]
    layer = layer if isinstance(layer, nn.Module) else Calls(layer)
    error = error_of(inside(layer))
    message = str(error)
    assert type(error) is ValueError
    assert message.startswith(f"Layer `outer.0.1` ({type(layer).__name__}) uses "), message
    assert operation in message
    assert instead in message
    assert len(message) < 300
    assert "\n" not in message


def test_layers_of_torch_the_whole_module_and_the_loss_are_named():
    layer = nn.Linear(8, 4)
    part = Calls(lambda x: x[x > 0])
    parametrize.register_parametrization(layer, "weight", part, unsafe=True)
    message = str(error_of(inside(layer)))
    assert message.startswith("Layer `outer.0.1.parametrizations.weight.0` ")
    message = str(error_of(nn.Embedding(4, 8, max_norm=1.0), lambda m, x: m(x.long()).sum()))
    assert message.startswith("The module (nn.Embedding) uses aten.embedding_renorm")
    message = str(error_of(nn.Linear(8, 8), lambda m, x: m(x) if x.any() else x))
    assert message.startswith("The loss function uses aten._local_scalar_dense")


def test_errors_of_torch_and_of_the_module_stay():
    error = error_of(Calls(lambda x: x @ torch.ones(3, 3)))
    assert type(error) is RuntimeError
    assert "form in jax" not in str(error)
    own = KeyError("mine")

    def fail(x):
        raise own

    assert error_of(Calls(fail)) is own
