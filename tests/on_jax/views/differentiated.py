"""Functions of one tensor, their values and gradients in torch and on jax's engine."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from torch_compat import on_jax

X = np.arange(1.0, 13.0, dtype=np.float32).reshape(3, 4) / 8
WEIGHTS = np.arange(12.0, dtype=np.float32) - 5


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **options):
        return self.function(*args, **options)


def in_torch(function):
    x = torch.from_numpy(X.copy()).requires_grad_()
    value = function(x * 1)
    value.backward()
    return value.item(), x.grad.numpy()


def in_jax(function):
    apply = on_jax.as_apply(Function(lambda x: function(x * 1)))
    return jax.value_and_grad(lambda x: apply({}, {}, x))(jnp.asarray(X))


def assert_as_torch(functions):
    """Those of a dict of functions in one program, each of an argument of its own."""
    xs = {name: jnp.asarray(X) for name in functions}

    def summed(xs):
        applied = {
            n: on_jax.as_apply(Function(lambda x, f=f: f(x * 1))) for n, f in functions.items()
        }
        values = {name: apply({}, {}, xs[name]) for name, apply in applied.items()}
        return sum(values.values()), values

    gradients, values = jax.jit(jax.grad(summed, has_aux=True))(xs)
    for name, function in functions.items():
        wanted, of_torch = in_torch(function)
        for found, of in ((values[name], wanted), (gradients[name], of_torch)):
            np.testing.assert_allclose(found, of, rtol=1e-6, atol=1e-6, err_msg=name)


def all_read(x, other, view):
    """A number that tells the elements of what is viewed, of another view and of the view."""
    return (x * x).sum() + (other * torch.tensor(WEIGHTS)).sum() + (view**3).sum()
