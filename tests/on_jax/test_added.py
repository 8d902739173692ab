"""Operations that torchax lacks or computes otherwise agree with torch."""

import jax
import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from torch_compat import on_jax

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
IDS = np.array([[0, 1, 2, 2], [0, 0, 3, 1]], np.int32)


class Calls(nn.Module):
    def __init__(self, layer, function) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x):
        return self.function(self.layer, x)


def linear(function):
    return Calls(nn.Linear(8, 8), function)


def bag(options, *arguments, **named):
    def call(layer, ids):
        return layer(ids.flatten() if arguments else ids, *arguments, **named)

    return Calls(nn.EmbeddingBag(5, 3, **options), call)


def sampled(layer, x):
    grid = F.affine_grid(layer(x)[0, :6].reshape(1, 2, 3), [1, 2, 4, 4], align_corners=False)
    return F.grid_sample(layer(x).reshape(1, 2, 4, 4), grid, align_corners=False)


def into(make):
    """The operation writes into `out` where torch allows it: while nothing is differentiated."""

    def call(layer, x):
        with torch.no_grad():
            return layer(x).detach() + make(x)

    return linear(call)


def part(x):
    y = torch.zeros(6, 8)
    torch.mul(x, 2.0, out=y[1:5])
    return y[1:5] + y[:4]


def ranged(x):
    y = torch.zeros(8)
    torch.arange(8.0, out=y)
    return y


def solved(layer, x, **options):
    return torch.linalg.solve(layer.weight + 4 * torch.eye(8), x, **options)


OFFSETS = torch.tensor([0, 3, 3, 5])
CASES = {
    "padding": (lambda: nn.Embedding(5, 3, padding_idx=0), IDS),
    "gradients by frequency": (lambda: nn.Embedding(5, 3, scale_grad_by_freq=True), IDS),
    "bags of equal size": (lambda: bag({}), IDS),
    "sums of bags": (lambda: bag({"mode": "sum", "padding_idx": 2}, OFFSETS), IDS),
    "means of bags": (lambda: bag({"mode": "mean", "padding_idx": 2}, OFFSETS), IDS),
    "maxima of bags": (lambda: bag({"mode": "max", "padding_idx": 2}, OFFSETS), IDS),
    "bags with a last offset": (
        lambda: bag({"mode": "sum", "include_last_offset": True}, torch.tensor([0, 3, 8])),
        IDS,
    ),
    "weighted bags": (
        lambda: bag({"mode": "sum"}, OFFSETS, per_sample_weights=torch.arange(8.0)),
        IDS,
    ),
    "grid_sample": (lambda: linear(sampled), X),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(8, 8)), X),
    "orthogonal by Cayley": (
        lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"),
        X,
    ),
    "solve": (lambda: linear(lambda m, x: solved(m, x.T[:, :3])), X),
    "solve from the right": (lambda: linear(lambda m, x: solved(m, x, left=False)), X),
    "solve of one vector": (lambda: linear(lambda m, x: solved(m, x[0])), X),
    "solve of squares": (lambda: linear(lambda m, x: solved(m, m.weight.T)), X),
    "to the CPU": (lambda: linear(lambda m, x: m(x).cpu() + x.to("cpu", torch.float32)), X),
    "quantile": (lambda: linear(lambda m, x: m(x).quantile(0.3, 0)), X),
    "a row copied to all": (
        lambda: linear(lambda m, x: x.clone().copy_(m(x)[0]) + x.clone().copy_(torch.ones(()))),
        X,
    ),
    "out": (lambda: into(lambda x: torch.add(x, 1.0, out=torch.empty(4, 8))), X),
    "empty out": (lambda: into(lambda x: torch.add(x, 1.0, out=torch.empty(0))), X),
    "out in a slice": (lambda: into(part), X),
    "out of a constructor": (lambda: into(ranged), X),
    "two outs": (
        lambda: into(lambda x: torch.max(x, 0, out=(torch.ones(8), torch.ones(8).long()))[0]),
        X,
    ),
}


def masked(mask, **options):
    """Return attention between rows of which `mask` allows some no key at all."""

    def call(layer, x):
        heads = layer(x).reshape(2, 1, 4, 4)
        allowed = mask(x) if callable(mask) else mask
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=allowed, **options)

    return lambda: linear(call)


def grouped(layer, x):
    heads = layer(x).reshape(1, 2, 4, 4)
    return F.scaled_dot_product_attention(
        heads, heads[:, :1], heads[:, :1], attn_mask=ALLOWED, enable_gqa=True
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        rows = x.reshape(2, 2, 8)
        padding = torch.tensor([[False, False], [True, True]])
        return self.attention(rows, rows, rows, key_padding_mask=padding, need_weights=False)[0]


def masked_by_zeros(layer, x):
    """Return outputs of a layer of which one row is zero."""
    return layer(x) * torch.tensor([[1.0], [0.0], [1.0], [1.0]])


def at_zero(function):
    return lambda: linear(lambda m, x: function(masked_by_zeros(m, x)))


def by_classes(function, target):
    return lambda: linear(lambda m, x: function(m(x), target))


def einsum_written(equation, is_list=False):
    def call(layer, x):
        y = layer(x)[:, :4] * 1.0
        torch.einsum(equation, [y] if is_list else y)[0] = 0.0
        return y

    return lambda: linear(call)


def order(x):
    return torch.argsort(x, dim=1)


ALLOWED = torch.tensor([[True, True, True, False], [False] * 4, [True] * 4, [False] * 4])
PENALTY = torch.zeros(4, 4).masked_fill(~ALLOWED, -torch.inf)
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])
LABELS = torch.tensor([3, 0, -1, 1, 2, -1, 4, 5])
CLOSE_CASES = {
    "attention to no key": masked(ALLOWED),
    "attention to no key, by penalties": masked(PENALTY),
    "attention to no key of a sequence": masked(
        torch.tensor([True, False])[:, None, None, None].expand(2, 1, 4, 4)
    ),
    "attention to no key, of one mask for all rows": masked(
        torch.tensor([True, False])[:, None, None, None].expand(2, 1, 1, 4)
    ),
    "attention by a traced mask": masked(lambda x: (x[:, :1] > 0).expand(4, 4)),
    "attention by traced penalties": masked(
        lambda x: torch.zeros(4, 4).masked_fill(x[:, :1] > 0, -torch.inf)
    ),
    "attention to no key, with a scale": masked(ALLOWED, scale=0.3),
    "causal attention": masked(None, is_causal=True),
    "attention to no key, of groups": lambda: linear(grouped),
    "attention of a layer to no key": Attention,
    "vector_norm": at_zero(lambda y: torch.linalg.vector_norm(y, dim=1)),
    "vector_norm that keeps": at_zero(lambda y: torch.linalg.vector_norm(y, dim=-1, keepdim=True)),
    "vector_norm of order 3": at_zero(lambda y: torch.linalg.vector_norm(y, 3, dim=1)),
    "vector_norm of order 1.5": at_zero(lambda y: torch.linalg.vector_norm(y, 1.5, dim=1)),
    "vector_norm of order 1": at_zero(lambda y: torch.linalg.vector_norm(y, 1, dim=1)),
    "vector_norm of infinite order": at_zero(
        lambda y: torch.linalg.vector_norm(y, torch.inf, dim=1)
    ),
    "vector_norm of all": at_zero(lambda y: torch.linalg.vector_norm(y * 0.0)),
    "vector_norm of a dtype": at_zero(
        lambda y: torch.linalg.vector_norm(y.half(), dim=1, dtype=torch.float32)
    ),
    "norm of all": at_zero(lambda y: torch.norm(y * 0.0)),
    "norm": at_zero(lambda y: y.norm(dim=1)),
    "norm of order 3": at_zero(lambda y: y.norm(3, dim=1)),
    "norm of matrices": at_zero(lambda y: torch.linalg.norm(y.reshape(4, 2, 4), dim=(1, 2))),
    "normalize": at_zero(F.normalize),
    "cosine_similarity": at_zero(lambda y: F.cosine_similarity(y, y + 1)),
    "pairwise_distance": at_zero(lambda y: F.pairwise_distance(y, y, eps=0.0)),
    "dist": at_zero(lambda y: torch.dist(y, y)),
    "std": at_zero(lambda y: y.std(1)),
    "std of all": at_zero(lambda y: (y * 0.0).std()),
    "std_mean": at_zero(lambda y: torch.std_mean(y, 1, keepdim=True)[0]),
    "cdist": at_zero(lambda y: torch.cdist(y, y)),
    "cdist of order 1": at_zero(lambda y: torch.cdist(y, y, p=1.0)),
    "cdist of order 3": at_zero(lambda y: torch.cdist(y, y, p=3.0)),
    "cdist of infinite order": at_zero(lambda y: torch.cdist(y, y[:3], p=torch.inf)),
    "pdist": at_zero(lambda y: F.pdist(torch.cat([y, y]))),
    "multilabel_margin_loss": by_classes(F.multilabel_margin_loss, LABELS.expand(4, 8)),
    "multilabel_margin_loss of one": lambda: linear(
        lambda m, x: F.multilabel_margin_loss(m(x)[0], LABELS, reduction="sum")
    ),
    "multilabel_margin_loss of each": lambda: linear(
        lambda m, x: F.multilabel_margin_loss(m(x), LABELS.expand(4, 8), reduction="none")
    ),
    "multi_margin_loss": by_classes(F.multi_margin_loss, torch.tensor([1, 0, 7, 3])),
    "soft_margin_loss": by_classes(F.soft_margin_loss, SIGNS[:, None].expand(4, 8)),
    "multilabel_soft_margin_loss": by_classes(
        F.multilabel_soft_margin_loss, (SIGNS[:, None].expand(4, 8) + 1) / 2
    ),
    "triplet_margin_loss": lambda: linear(
        lambda m, x: F.triplet_margin_loss(m(x), m(x), x, swap=True)
    ),
    "hinge_embedding_loss": by_classes(F.hinge_embedding_loss, SIGNS[:, None].expand(4, 8)),
    "cosine_embedding_loss": lambda: linear(
        lambda m, x: F.cosine_embedding_loss(masked_by_zeros(m, x), x, SIGNS, margin=0.1)
    ),
    "margin_ranking_loss": lambda: linear(
        lambda m, x: F.margin_ranking_loss(m(x)[:, 0], x[:, 0], SIGNS, margin=0.1)
    ),
    "smooth_l1_loss": lambda: linear(lambda m, x: F.smooth_l1_loss(m(x), x, beta=0.5)),
    "huber_loss": lambda: linear(lambda m, x: F.huber_loss(m(x), x, delta=0.5)),
    "kl_div": lambda: linear(
        lambda m, x: F.kl_div(
            m(x).log_softmax(1), x.log_softmax(1), log_target=True, reduction="batchmean"
        )
    ),
    "poisson_nll_loss": lambda: linear(lambda m, x: F.poisson_nll_loss(m(x), x.abs(), full=True)),
    "a diagonal by einsum": einsum_written("ii->i"),
    "a transpose by einsum": einsum_written("ij->ji", is_list=True),
    "a sum by einsum": lambda: linear(lambda m, x: torch.einsum("ij->j", m(x))),
    "a product by einsum": lambda: linear(lambda m, x: torch.einsum("ij,kj->ik", m(x), x)),
    "take_along_dim": lambda: linear(lambda m, x: torch.take_along_dim(m(x), order(x), 1)),
    "Tensor.take_along_dim": lambda: linear(
        lambda m, x: m(x).take_along_dim(order(x)[:, :2], dim=-1)
    ),
    "take_along_dim of all": lambda: linear(lambda m, x: torch.take_along_dim(m(x), order(x))),
    "take_along_dim of one for all": lambda: linear(
        lambda m, x: torch.take_along_dim(m(x), order(x)[:1], dim=1)
    ),
}


def assert_as_in_torch(module, x, tolerance):
    def loss(module, x):
        return ((module(x) + 0.3) ** 2).mean()

    loss_fn, params, state = on_jax.as_loss(module, loss)
    compute = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    (value, _), gradients = compute(params, x, model_state=state)
    wanted = loss(module, torch.from_numpy(x))
    assert abs(float(value) - wanted.item()) < models.TOLERANCE
    if not wanted.requires_grad:
        return
    wanted.backward()
    named = dict(module.named_parameters())
    zeros = {n: np.zeros(p.shape) for n, p in named.items()}
    wanted = {n: zeros[n] if named[n].grad is None else named[n].grad.numpy() for n in params}
    models.assert_close(gradients, wanted, tolerance)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_torchs(case):
    make, x = CASES[case]
    assert_as_in_torch(make(), x, 1e-4)


@pytest.mark.parametrize("case", CLOSE_CASES)
def test_losses_and_gradients_are_torchs_where_torchaxs_are_not(case):
    torch.manual_seed(0)
    assert_as_in_torch(CLOSE_CASES[case](), X, 1e-6)


OUTSIDE = torch.zeros(4, 8)
REFUSED = {
    r"`out` has the shape \(4, 7\) and the result \(4, 8\)": lambda m, x: torch.add(
        x, 1.0, out=torch.empty(4, 7)
    ),
    "`out` is a tensor that was made outside": lambda m, x: torch.add(x, 1.0, out=OUTSIDE),
    "writes into a tensor that was made outside": lambda m, x: OUTSIDE.add_(x),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_written_is_refused(message):
    loss_fn, params, _ = on_jax.as_loss(linear(REFUSED[message]), lambda m, x: m(x).sum())
    with pytest.raises(ValueError, match=message):
        jax.jit(loss_fn)(params, X)
    assert not OUTSIDE.any()
