"""What torch itself does about gradients inside a module; other threads notice no trace."""

import threading

import jax
import models
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_compat import on_jax

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


class Sign(torch.autograd.Function):
    """With a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 7 * gradient * x


def of_function(module, x):
    return (Sign.apply(module(x)) * torch.linspace(0, 1, 8)).sum()


def of_gradients(module, x):
    (gradient,) = torch.autograd.grad(module(x).tanh().sum(), module.weight, create_graph=True)
    return gradient.square().sum()


def of_hooks(module, x):
    y = module(x)
    y.register_hook(lambda gradient: 3 * gradient)
    return y.square().sum()


@pytest.mark.parametrize("loss", [of_function, of_gradients, of_hooks])
def test_a_module_may_differentiate_by_itself(loss):
    models.assert_as_torch(nn.Linear(8, 8), loss, X)


def test_checkpoints_have_the_dropout_of_the_forward_pass():
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    def loss(module, x):
        y = checkpoint(module, x, use_reentrant=False)
        return y.sum(), {"kept": (y != 0).sum()}

    loss_fn, params, _ = on_jax.as_loss(module, loss)
    compute = jax.jit(jax.grad(loss_fn, has_aux=True))
    gradients, (metrics, _) = compute(params, X, rng=jax.random.key(0))
    assert gradients["0.bias"].sum() == 2 * metrics["kept"]


def test_another_thread_has_functions_of_its_own():
    found = []

    def elsewhere():
        x = torch.ones(3, requires_grad=True)
        checkpoint(torch.exp, x, use_reentrant=False).sum().backward()
        found.append((x.grad.tolist(), torch.compiler.is_compiling()))

    class Starts(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            return x * torch.compiler.is_compiling()

    assert on_jax.as_apply(Starts())({}, {}, np.float32(2)) == 2
    assert found == [(pytest.approx([np.e] * 3), False)]
