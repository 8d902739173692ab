"""Losses and gradients of layers and operations are torch's, also where torchax lacks them.

All cases of a table are one program. Each has parameters of its own, whose names tell it.
"""

import math
import warnings

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from torch_compat import on_jax

IDS = torch.tensor([[0, 1, 2, 2], [0, 0, 3, 1]])
OFFSETS, ENDS = torch.tensor([0, 3, 3, 5]), torch.tensor([0, 3, 8])
ALLOWED = torch.tensor([[True, True, True, False], [False] * 4, [True] * 4, [False] * 4])
PENALTY = torch.zeros(4, 4).masked_fill(~ALLOWED, -torch.inf)
MANY = torch.linspace(0.5, 1.5, 28)[:, None]
HELD, BY_NAME = [torch.arange(8.0)], {"signs": torch.ones(4)}
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])


def bag(options, *arguments, **named):
    return nn.EmbeddingBag(5, 3, **options), lambda m, x: m(IDS.flatten(), *arguments, **named)


def at_zero(function):
    """Of outputs of a layer of which one row is zero."""
    return lambda m, x: function(m(x) * torch.tensor([[1.0], [0.0], [1.0], [1.0]]))


def attended(mask, **options):
    """Attention between rows of which `mask` allows some no key at all."""

    def call(m, x):
        heads = m(x).reshape(2, 1, 4, 4)
        allowed = mask(x) if callable(mask) else mask
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=allowed, **options)

    return call


def grouped(m, x):
    heads = m(x).reshape(1, 2, 4, 4)
    keys = heads[:, :1]
    return F.scaled_dot_product_attention(heads, keys, keys, attn_mask=ALLOWED, enable_gqa=True)


def padded(m, x):
    rows, padding = x.reshape(2, 2, 8), torch.tensor([[False, False], [True, True]])
    return m(rows, rows, rows, key_padding_mask=padding, need_weights=False)[0]


def einsum_written(equation, is_list=False):
    def call(m, x):
        y = m(x)[:, :4] * 1.0
        torch.einsum(equation, [y] if is_list else y)[0] = 0.0
        return y

    return call


def out(make):
    """The operation writes into `out` where torch allows it: while nothing is differentiated."""

    def call(m, x):
        with torch.no_grad():
            written = make(x)
        return m(x) * written

    return call


def part(x):
    y = torch.zeros(6, 8)
    torch.mul(x, 2.0, out=y[1:5])
    return y[1:5] + y[:4]


def written(m, x):
    y = m(x).clone()
    y[:, 0] = 0.0
    y[:, 1:3] += 1
    y[y > 1] = 1.0
    return F.relu_(y) * 2


def stopped(m, x):
    y = m(x)
    with torch.no_grad():
        target, half = m(x) * 2, m(x)[:, :4]
        y.mul_(0.5)  # unrecorded: as if it were not there
    return y * target + torch.cat([half, half], -1) + y.detach()


def created(m, x):
    ones = torch.ones(8, device=x.device, dtype=x.dtype)
    return m(x) + x.new_full((8,), 2.0) * ones + torch.tensor([1.0] * 8) + torch.hann_window(8)


def corner(m, x):
    return m(x)[:, 2:6][tuple(torch.tril_indices(4, 4))] + m(x)[1:][:, [1, 3]][0, 0]


def cases():
    """Layers with functions of them and of rows; a function alone is of a linear layer."""
    return {
        "padding": (nn.Embedding(5, 3, padding_idx=0), lambda m, x: m(IDS)),
        "by frequency": (nn.Embedding(5, 3, scale_grad_by_freq=True), lambda m, x: m(IDS)),
        "maxima of bags": bag({"mode": "max", "padding_idx": 2}, OFFSETS),
        "bags with a last offset": bag({"mode": "sum", "include_last_offset": True}, ENDS),
        "weighted bags": bag({"mode": "sum"}, OFFSETS, per_sample_weights=torch.arange(8.0)),
        "attention of a layer": (nn.MultiheadAttention(8, 2, batch_first=True), padded),
        "attention by a mask": attended(ALLOWED),
        "attention by penalties": attended(PENALTY, scale=0.3),
        "attention by a traced mask": attended(lambda x: (x[:, :1] > 0).expand(4, 4)),
        "attention of groups": grouped,
        "a diagonal by einsum": einsum_written("ii->i"),
        "a transpose by einsum": einsum_written("ij->ji", is_list=True),
        "take_along_dim": lambda m, x: m(x).take_along_dim(x.argsort(1)[:, :2], dim=-1),
        "a row copied to all": lambda m, x: x.clone().copy_(m(x)[0]),
        "out": out(lambda x: torch.add(x, 1.0, out=torch.empty(4, 8))),
        "out in a slice": out(part),
        "two outs": out(lambda x: torch.max(x, 0, out=(torch.ones(8), torch.ones(8).long()))[0]),
        "checkpoints": lambda m, x: checkpoint(m, x, use_reentrant=False),
        "no_grad": stopped,
        "written in place": written,
        "indexed slices": corner,
        "created inside": created,
        "another dtype inside": lambda m, x: m(x).to(torch.bfloat16).float(),
    }


def causal(m, x):
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    return m(x, x, x, attn_mask=mask, need_weights=False)[0]


def of_sequences(function):
    return lambda m, x: function(m, x[:, None] + torch.arange(5)[:, None] / 3)


def rough_cases():
    """Those whose sums are long, or divided by small numbers."""
    with warnings.catch_warnings():  # torch would rather have the newer one
        warnings.simplefilter("ignore", FutureWarning)
        old = nn.utils.weight_norm(nn.Linear(8, 4))
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def call(m, x):
        return m(x)

    return {
        "attention": (attention, of_sequences(causal)),
        "weight norm": (parametrizations.weight_norm(nn.Linear(8, 4)), call),
        "old weight norm": (old, call),
        "spectral norm": (parametrizations.spectral_norm(nn.Linear(8, 4)), call),
        "orthogonal by householder": (
            parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="householder"),
            call,
        ),
        "cdist of many": at_zero(lambda y: torch.cdist(y.repeat(7, 1) + MANY, y)),
    }


def copied(m, x):
    """Copies of tensors that a global, a list and a dict hold are written in place."""
    one = HELD[0].clone()
    one[0] = 5.0
    two = HELD[0] + 1
    two += x[0]
    three = torch.zeros_like(BY_NAME["signs"])
    three[1:] = 3.0
    return m(x)[:, :4] * one[None, :4] + two[:4] + three * SIGNS.mul(2).mul_(2)


def unusual_cases():
    """Layers whose options are absent or rare."""

    def of(*shape):
        return lambda m, x: m(x.reshape(shape))

    def call(m, x):
        return m(x)

    def pooled(layer, *shape):
        return nn.Sequential(nn.Linear(8, math.prod(shape)), nn.Unflatten(1, shape), layer), call

    class Filtered(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.register_buffer("filter", torch.randn(2, 1, 3))

        def forward(self, x):
            return F.conv1d((x * self.scale)[:, None], self.filter)

    spread = torch.arange(8.0).diag()
    frozen = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 2))
    frozen[2].requires_grad_(False)
    transposed = nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2, dilation=2)
    windows = nn.AvgPool3d((2, 1, 3), (1, 2, 2), (1, 0, 1), ceil_mode=True)
    both = {"groups": 2, "stride": 2, "bias": False}
    return {
        "1d without bias": (nn.Conv1d(1, 3, 3, bias=False), of(4, 1, 8)),
        "2d without bias": (nn.Conv2d(2, 4, 2, padding="valid", bias=False), of(4, 2, 2, 2)),
        "3d without bias": (nn.Conv3d(1, 4, 2, bias=False), of(4, 1, 2, 2, 2)),
        "1d transposed": (nn.ConvTranspose1d(4, 6, 3, **both), of(2, 4, 4)),
        "3d transposed": (nn.ConvTranspose3d(4, 4, (1, 2, 3), **both), of(2, 4, 2, 2, 1)),
        "frozen convolution": (frozen, call),
        "filter in a buffer": (Filtered(), call),
        "same": (nn.Conv2d(2, 4, 3, padding="same", groups=2), of(4, 2, 2, 2)),
        "2d transposed": (transposed, of(2, 4, 2, 2)),
        "each alone transposed": (nn.ConvTranspose2d(4, 4, 3, groups=4), of(2, 4, 2, 2)),
        "padding that counts": pooled(nn.AvgPool2d(2, padding=1, ceil_mode=True), 2, 3, 3),
        "windows of two sizes": pooled(windows, 1, 3, 3, 3),
        "norms of windows": pooled(nn.LPPool2d(2, 2, ceil_mode=True), 2, 3, 3),
        "ids by full": (nn.Embedding(5, 3), lambda m, x: m(torch.full((4,), 2))),
        "labels by full": lambda m, x: F.cross_entropy(m(x), torch.full((4,), 2)),
        "large by full": lambda m, x: m(x) * (torch.full((8,), 2**24 + 1) - 2**24),
        "eigenvalues": lambda m, x: torch.linalg.eigvalsh(m.weight + spread),
        "eigenvectors": lambda m, x: torch.linalg.eigh(m.weight + spread)[1] ** 2,
        "of the other triangle": lambda m, x: torch.linalg.eigvalsh(m.weight + spread, UPLO="U"),
        "slogdet": lambda m, x: torch.linalg.slogdet(m.weight + 2 * torch.eye(8))[1],
        "logdet": lambda m, x: torch.logdet(m.weight.T + 2 * torch.eye(8)),
        "copies": copied,
        "cosine_similarity": lambda m, x: F.cosine_similarity(m(x), HELD[0], dim=-1),
    }


class Together(nn.Module):
    def __init__(self, table: dict) -> None:
        super().__init__()
        self.functions = {}
        for name, case in table.items():
            layer, self.functions[name] = (nn.Linear(8, 8), case) if callable(case) else case
            self.add_module(f"of {name}", layer)

    def forward(self, x):
        parts = dict(self.named_children())
        return {name: call(parts[f"of {name}"], x) for name, call in self.functions.items()}


def summed(module, x):
    losses = {name: ((y + 0.3) ** 2).mean() for name, y in module(x).items()}
    return sum(losses.values()), losses


@pytest.mark.parametrize(
    ("make", "tolerance"), [(cases, 2e-6), (rough_cases, 1e-5), (unusual_cases, 1e-5)]
)
def test_losses_and_gradients_are_torchs(make, tolerance):
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    models.assert_as_torch(
        Together(make()), summed, x, tolerance, part_of=lambda name: name.partition(".")[0]
    )


NORMS = {
    "momentum": (nn.BatchNorm2d(3), (4, 3, 2, 2)),
    "a mean of all batches": (nn.BatchNorm1d(3, momentum=None), (4, 3)),
    "no statistics": (nn.BatchNorm1d(3, track_running_stats=False), (4, 3)),
    "instances": (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (2, 3, 5)),
}


@pytest.mark.parametrize("case", NORMS)
def test_normalisation_with_running_statistics_is_torchs(case):
    layer, shape = NORMS[case]
    scale = nn.Parameter(torch.ones(shape[1:]))  # its gradient tells that of the input

    def loss(module, x):
        return ((module[0](x * module.scale) + 0.3) ** 2 * torch.arange(shape[-1])).mean()

    for training in (True, False):
        for batch in np.random.default_rng(0).normal(2, 3, (2, *shape)).astype(np.float32):
            module = nn.Sequential(layer.train(training))
            module.scale, scale.grad = scale, None
            module.zero_grad()
            models.assert_as_torch(module, loss, batch)


def test_half_precision_is_summed_in_float32():
    module = nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4)).to(torch.bfloat16)
    module[0].running_mean = module[0].running_mean.float()
    module[0].running_var = module[0].running_var.float()
    loss_fn, params, state = on_jax.as_loss(module, lambda m, x: m(x.bfloat16()).float().mean())
    x = torch.from_numpy(np.random.default_rng(0).normal(5, 1, (512, 4))).bfloat16().float().numpy()
    _, (_, state) = loss_fn(params, x, model_state=state)
    np.testing.assert_allclose(state["0.running_mean"], 0.1 * x.mean(0), atol=1e-5)
    variance = 0.9 + 0.1 * x.var(0, ddof=1)
    np.testing.assert_allclose(state["0.running_var"], variance, atol=1e-5)
