"""Other threads notice nothing of a trace."""

import threading

import torch

from torch_compat.on_jax.tracing import tracing


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
