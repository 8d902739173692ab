"""Values and gradients are torch's where functions have kinks, ties, branches and singularities."""

import jax
import kinks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_compat import on_jax


class Rows(nn.Module):
    """All rows of a group, each with parameters of its own."""

    def __init__(self, group: str) -> None:
        super().__init__()
        make, *inputs = kinks.GROUPS[group]
        self.functions = make()
        self.points = nn.ModuleList(
            nn.ParameterList(nn.Parameter(x.clone()) for x in inputs) for _ in self.functions
        )

    def forward(self):
        pairs = zip(self.functions.items(), self.points, strict=True)
        return {name: function(*points) for (name, function), points in pairs}


def weights(y):
    size = int(np.prod(y.shape))
    return np.linspace(0.7, 1.9, size, dtype=np.float32).reshape(y.shape)


def is_close(found, wanted):
    size = np.abs(wanted[np.isfinite(wanted)]).max(initial=1)
    return np.allclose(found, wanted, rtol=1e-4, atol=1e-5 * size, equal_nan=True)


@pytest.mark.parametrize("group", kinks.GROUPS)
def test_values_and_gradients_are_torchs(group):
    rows = Rows(group)
    apply = on_jax.as_apply(rows)
    _, params, state = on_jax.as_loss(rows, lambda module, batch: 0)

    def summed(params):
        results = apply(params, state)
        return sum((y * weights(y)).sum() for y in results.values()), results

    gradients, results = jax.jit(jax.grad(summed, has_aux=True))(params)
    wrong = []
    for i, (name, y) in enumerate(rows().items()):
        if y.requires_grad:
            (y * torch.from_numpy(weights(y))).sum().backward()
        pairs = [(np.asarray(results[name]), y.detach().numpy())]
        for j, x in enumerate(rows.points[i]):
            wanted = torch.zeros_like(x) if x.grad is None else x.grad
            pairs.append((np.asarray(gradients[f"points.{i}.{j}"]), wanted.numpy(force=True)))
        if not all(is_close(found, wanted) for found, wanted in pairs):
            wrong.append(name)
    assert not wrong


def curved(module, x):
    y = module(x)
    norms = torch.linalg.vector_norm(y, dim=1, keepdim=True)
    return (F.softplus(y).pow(3) + F.elu(y) * y.clamp(-1, 1) + norms + y.std(1, keepdim=True)).sum()


def test_second_derivatives_are_torchs():
    module, x = nn.Linear(3, 3, bias=False), torch.linspace(-1, 1, 12).reshape(4, 3)
    loss_fn, params, _ = on_jax.as_loss(module, curved)
    found = jax.jit(jax.hessian(lambda params: loss_fn(params, x.numpy())[0]))(params)

    def of_weight(weight):
        return curved(lambda x: x @ weight.T, x)

    wanted = torch.autograd.functional.hessian(of_weight, module.weight).numpy()
    np.testing.assert_allclose(found["weight"]["weight"], wanted, atol=1e-5 * np.abs(wanted).max())
