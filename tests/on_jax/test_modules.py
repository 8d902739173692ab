"""Losses and gradients of many layers are torch's; those that cannot be are refused."""

import warnings
from collections.abc import Callable

import jax
import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from torch_compat import on_jax


class Calls(nn.Module):
    """`function(layer, x)` as a module."""

    def __init__(self, layer: nn.Module, function: Callable) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x):
        return self.function(self.layer, x)


def old_weight_norm():
    with warnings.catch_warnings():  # torch would rather have the newer one
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(8, 4))


def causal(layer, x):
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    return layer(x, x, x, attn_mask=mask, need_weights=False)[0]


def decoded(layer, x):
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return layer(x, x, tgt_mask=mask, tgt_is_causal=True)


def written(layer, x):
    y = layer(x).clone()
    y[:, 0] = 0.0
    y[:, 1:3] += 1
    y[y > 1] = 1.0
    return F.relu_(y) * 2


def stopped(layer, x):
    y = layer(x)
    with torch.no_grad():
        target, part = layer(x) * 2, layer(x)[:, :4]
        y.mul_(0.5)  # unrecorded: as if it were not there
    return y * target + torch.cat([part, part], -1) + y.detach()


def created(layer, x):
    ones = torch.ones(8, device=x.device, dtype=x.dtype)
    return layer(x) + x.new_full((8,), 2.0) * ones + torch.tensor([1.0] * 8) + torch.hann_window(8)


def encoder(**options):
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)


def linear(function, out=8):
    return lambda: Calls(nn.Linear(8, out), function)


FLAT, SEQUENCE, IMAGE = (4, 8), (2, 5, 8), (2, 3, 8, 8)
CASES = {
    "encoder": (lambda: encoder(dropout=0.0), SEQUENCE),
    "encoder that evaluates": (lambda: encoder().eval(), SEQUENCE),
    "decoder": (
        lambda: Calls(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), decoded),
        SEQUENCE,
    ),
    "attention": (lambda: Calls(nn.MultiheadAttention(8, 2, batch_first=True), causal), SEQUENCE),
    "causal attention": (
        linear(lambda m, x: F.scaled_dot_product_attention(m(x), x, x, is_causal=True)),
        SEQUENCE,
    ),
    "LSTM": (lambda: Calls(nn.LSTM(8, 6, batch_first=True), lambda m, x: m(x)[0]), SEQUENCE),
    "GRU": (lambda: Calls(nn.GRU(8, 6, batch_first=True), lambda m, x: m(x)[0]), SEQUENCE),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 4)), FLAT),
    "old weight norm": (old_weight_norm, FLAT),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 4)), FLAT),
    "group norm": (lambda: nn.GroupNorm(4, 8), FLAT),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8)), FLAT),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, groups=3),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(6, 2, 3, stride=2),
            nn.AdaptiveAvgPool2d(2),
        ),
        IMAGE,
    ),
    "activations": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.PReLU(), nn.SiLU(), nn.Hardswish()),
        FLAT,
    ),
    "checkpoints": (linear(lambda m, x: checkpoint(m, x, use_reentrant=False)), FLAT),
    "no_grad": (linear(stopped), FLAT),
    "written in place": (linear(written), FLAT),
    "indexed slices": (
        linear(
            lambda m, x: m(x)[:, 2:6][tuple(torch.tril_indices(4, 4))] + m(x)[1:][:, [1, 3]][0, 0]
        ),
        FLAT,
    ),
    "created inside": (linear(created), FLAT),
    "similarity": (linear(lambda m, x: F.cosine_similarity(m(x), x)), FLAT),
    "sorted": (linear(lambda m, x: m(x).cumsum(-1).sort(-1)[0].roll(1, -1)[..., ::2]), FLAT),
    "Fourier": (linear(lambda m, x: torch.fft.rfft(m(x)).abs()), FLAT),
    "bfloat16 inside": (linear(lambda m, x: m(x).to(torch.bfloat16).float()), FLAT),
    "a loss with a mask": (
        linear(lambda m, x: F.cross_entropy(m(x), torch.tensor([1, -100, 2, 3]))),
        FLAT,
    ),
}


def loss(module, batch):
    return ((module(batch) + 0.3) ** 2).mean()


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_torchs(case):
    make, shape = CASES[case]
    module = make()
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    loss_fn, params, state = on_jax.as_loss(module, loss)
    compute = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    (value, (_, state)), gradients = compute(params, x, rng=jax.random.key(0), model_state=state)
    wanted = loss(module, torch.from_numpy(x))
    wanted.backward()
    assert abs(float(value) - wanted.item()) < models.TOLERANCE
    named = dict(module.named_parameters())
    models.assert_close(gradients, {n: named[n].grad.numpy() for n in params})
    models.assert_close(state, {n: models.held(module)[n] for n in state})


def test_bfloat16():
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(torch.bfloat16)
    loss_fn, params, _ = on_jax.as_loss(module, lambda m, x: (m(x).float() ** 2).mean())
    x = np.random.default_rng(0).normal(size=FLAT).astype(np.float32)
    gradients = jax.jit(jax.grad(loss_fn, has_aux=True))(
        params, jax.numpy.asarray(x, jax.numpy.bfloat16)
    )[0]
    assert {g.dtype for g in gradients.values()} == {jax.numpy.dtype("bfloat16")}
    (module(torch.from_numpy(x).bfloat16()).float() ** 2).mean().backward()
    for name, p in module.named_parameters():
        found = np.asarray(gradients[name], np.float32)
        np.testing.assert_allclose(found, p.grad.float(), atol=0.02)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def autocasting(module, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module(x)


KEPT = Sign.apply

REFUSED = {
    "Sign, a torch.autograd.Function": lambda m, x: Sign.apply(m(x)),
    "uses Sign, a torch.autograd.Function": lambda m, x: KEPT(m(x)),
    "use_reentrant=False": lambda m, x: checkpoint(m, x, use_reentrant=True),
    "torch.autocast": autocasting,
    r"differentiates by itself \(torch.autograd.grad": lambda m, x: torch.autograd.grad(
        m(x).sum(), m.weight
    )[0],
    r"differentiates .* backward": lambda m, x: m(x).sum().backward(),
    r"differentiates .* torch\.func": lambda m, x: torch.func.grad(lambda x: m(x).sum())(x),
    r"differentiates .* use jax\.grad": lambda m, x: torch.func.jvp(m, (x,), (x,))[1],
    "torch.Generator": lambda m, x: m(x) + torch.rand(8, generator=torch.Generator()),
    "no key": lambda m, x: F.dropout(m(x)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_jax_would_do_otherwise_is_refused(message):
    module = linear(REFUSED[message])()
    loss_fn, params, _ = on_jax.as_loss(module, loss)
    with pytest.raises(ValueError, match=message):
        jax.jit(loss_fn)(params, np.ones(FLAT, np.float32))


def test_functions_of_torch_alone_work_again_afterwards():
    x = torch.ones(3, requires_grad=True)
    Sign.apply(x).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0, 1.0]
