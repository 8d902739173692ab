"""Programs that write through views, modules that do, and what is refused."""

import copy

import models
import numpy as np
import torch
from torch import nn
from views.differentiated import WEIGHTS, X, assert_as_torch, in_jax

import jaxslowmo as js
from support.refusals import Refusal
from torch_compat import on_jax


def assigned(x):
    x[0] = x[1].clone()
    x[:, 1] = 1.0
    x[1:][0] = x[2:3].clone()  # a leading dimension of size 1
    x[[0, 1], [1, 2]] = x[0, :2].clone()
    x[x > 1.3] = 0.1
    x.t()[2] = x[:, 0].clone()
    x.view(2, 6)[torch.tensor([0])] += 9.0
    x[:, :2] = x[:, 2:].clone()
    return (x**3 * torch.tensor(WEIGHTS).view(3, 4)).sum()


def integers_and_booleans(x):
    i, mask = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.bool)
    i.view(-1)[2:5] = torch.tensor([1, 2, 3])
    i.t()[1].add_(5)
    mask.t()[0].fill_(True)
    mask.view(-1)[::2] = True
    mask.t().logical_not_()
    return (x * i * mask).sum() + (x * mask).sum()


def complex_numbers(x):
    c = torch.view_as_complex((x * 2).view(3, 2, 2))
    c.real.mul_(2)
    c.imag[0] = 1.0
    c[1] *= 1 + 2j
    torch.view_as_real(c).view(-1)[3:5] = 0.5
    c.conj().mul_(2j)
    return (torch.view_as_real(c) ** 3).sum()


def shapes_in_place(x):
    y = x * 2
    row, flat = y[0], y.view(-1)
    y.transpose_(0, 1)
    y[0] = 1.0
    y.unsqueeze_(1)
    y.squeeze_(1)
    y.t_()
    flat.unsqueeze_(0).squeeze_().mul_(3.0)
    return (y.t().reshape(-1) * torch.tensor(WEIGHTS)).sum() + (row**3).sum() + flat.sum()


def not_contiguous(x):
    """torch copies where it cannot view, also of results that are not contiguous."""
    a, b, c = x.t() + 1, x + 1, torch.einsum("ij,kj->ki", x, x)
    for result in (a, b, c, x.t()):
        result.reshape(-1).mul_(3.0)
    return (a**3).sum() + (b**3).sum() + c.sum() + x.sum()


PROGRAMS = assigned, integers_and_booleans, complex_numbers, shapes_in_place, not_contiguous


def test_programs_that_write():
    assert_as_torch({program.__name__: program for program in PROGRAMS})


def test_what_has_no_form_here_is_refused():
    def written(x):
        x[:1].expand(3, 4).mul_(2.0)
        return x.sum()

    Refusal(lambda: in_jax(written), "share memory").check()
    strided = lambda x: (x.t() + 1).as_strided((2, 2), (1, 1)).sum()  # noqa: E731
    Refusal(lambda: in_jax(strided), "as_strided").check()


class Writes(nn.Module):
    """Parameters and buffers that are written to through views of them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(X))
        self.register_buffer("count", torch.zeros(2, 2, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.zeros(4, dtype=torch.bool))

    def forward(self, x):
        self.weight.data.mul_(0.5)
        with torch.no_grad():
            self.weight.t()[1].add_(1.0)
            nn.init.zeros_(self.weight[2])
        self.count.view(-1)[1:] += 2
        self.mask.unsqueeze(0)[:, 1] = True
        self.mean.detach().lerp_(x.mean(0), 0.5)
        self.mean = self.mean.unsqueeze(0)[0]  # a view takes the buffer's place
        self.mean.mul_(2.0)
        return x @ (self.weight * self.mask + self.weight**2 + self.mean.detach()).t()


def test_parameters_and_buffers_of_a_module():
    module = Writes()
    _, params, state = on_jax.as_loss(module, models.loss)
    found, out = on_jax.as_apply(module)(params, state, X), copy.deepcopy(module)(torch.tensor(X))
    np.testing.assert_allclose(found, out.detach(), rtol=1e-6)
    models.assert_as_torch(module, lambda m, x: (m(x) ** 2).mean(), X, 2e-6)


def test_writes_through_views_in_a_training_step_over_replicas():
    """There jax's types say over which axes values vary, constants over none."""

    def loss(module, x):
        y = module(x)
        y.t()[0].mul_(2.0)
        y.view(-1)[0] = 0.0
        y[:, :2].copy_(y[:, 2:].flip(1) * 2)
        return (y.clone() ** 2).mean() + y.unsqueeze(0).permute(2, 1, 0)[1].add_(x[:, :1]).sum()

    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)[:, :4]
    step, state = models.step_of(module, loss, sync=js.local_sgd("replica", sync_every=1))
    state, _ = step(state, x)
    weights = []
    for half in np.split(x, 2):
        module.zero_grad()
        loss(module, torch.from_numpy(half)).backward()
        weights.append((module.weight - 0.1 * module.weight.grad).detach().numpy())
    np.testing.assert_allclose(state.params["weight"][0], np.mean(weights, 0), atol=1e-6)
