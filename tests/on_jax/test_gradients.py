"""Where gradients stop, and that other threads notice nothing of a trace."""

import threading

import jax
import jax.numpy as jnp
import torch

from torch_compat.on_jax.tracing import Tensor, tracing


def gradient(function, x=2.0):
    def of(x):
        with tracing(None) as env:
            return function(Tensor(x, env)).jax()

    return float(jax.grad(of)(jnp.float32(x)))


def test_what_is_done_without_gradient():
    def clamped(x):
        """What is changed unrecorded keeps its derivative."""
        y = x * 3
        with torch.no_grad():
            y.clamp_(max=1.0)
        return y * y

    def read(x):
        y = torch.stack([x, x])
        with torch.no_grad():
            part = y[0]
        return part * x

    def write(x):
        y = torch.stack([x, x])
        with torch.no_grad():
            y[0].fill_(5.0)
        return (y * y).sum()

    for function in (clamped, read, write):
        x = torch.tensor(2.0, requires_grad=True)
        function(x).backward()
        assert gradient(function) == x.grad.item()


def test_another_thread_has_functions_of_its_own():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 7 * gradient

    found = []

    def elsewhere():
        x = torch.ones((), requires_grad=True)
        Double.apply(x).backward()
        found.append(x.grad.item())

    with tracing(None):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found == [7.0]
