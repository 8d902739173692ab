"""jax's transformations of a module: every input, forward mode, programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from views.differentiated import Function

from torch_compat import on_jax

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8, dtype=np.int32) % 3


class Frozen(nn.Module):
    """A frozen parameter, float buffers, one of them written in place, and an integer one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 3)
        self.outer.weight.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, -1.0, 0.5]))
        self.register_buffer("seen", torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        self.seen.mul_(0.5).add_(1)
        x = self.norm(torch.tanh(self.inner(x)) * self.scale) * self.seen
        return self.outer(x)


def loss(module, batch):
    return F.cross_entropy(module(batch[0]), batch[1])


def made(training=True):
    module = Frozen().train(training)
    loss_fn, params, state = on_jax.as_loss(module, loss)
    floats = {n: x for n, x in state.items() if x.dtype == jnp.float32}
    whole = {n: x for n, x in state.items() if n not in floats}

    def value(params, floats, x=X):
        return loss_fn(params, (x, Y[: len(x)]), model_state={**floats, **whole})[0]

    return module, value, params, floats


def assert_close(found, wanted, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), found, wanted)


def dot(tree, other):
    return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, tree, other)))


def like(tree):
    """Return a direction to move in."""
    return jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), tree)


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_model_state_and_batch_are_torchs(training):
    module, value, params, floats = made(training)
    found = jax.jit(jax.grad(value, argnums=(0, 1, 2)))(params, floats, X)
    x = torch.from_numpy(X).requires_grad_()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {n: t for n, t in tensors.items() if n in {**params, **floats} and "run" not in n}
    for tensor in tensors.values():
        tensor.requires_grad_()
    copies = {n: t.clone() for n, t in tensors.items()}  # torch writes to no leaf
    logits = torch.func.functional_call(module, copies, (x,))
    F.cross_entropy(logits, torch.from_numpy(Y).long()).backward()
    assert_close(found[2], x.grad.numpy())
    both = {**found[0], **found[1]}
    assert_close({n: both[n] for n in tensors}, {n: t.grad.numpy() for n, t in tensors.items()})
    # torch has no derivative of these.
    for name in ("norm.running_mean", "norm.running_var"):
        numbers = jax.jit(lambda y, name=name: value(params, {**floats, name: y}))
        move = np.float32([0, 1e-2, 0, 0])
        slope = (numbers(floats[name] + move) - numbers(floats[name] - move)) / 2e-2
        assert found[1][name][1] == pytest.approx(slope, abs=1e-3)
        assert (found[1][name][1] != 0) == (not training)


def test_forward_mode_agrees_with_reverse_mode():
    _, value, params, floats = made()
    moves = like(params), like(floats)
    gradients = jax.grad(value, argnums=(0, 1))(params, floats)
    _, slope = jax.jvp(value, (params, floats), moves)
    assert slope == pytest.approx(dot(gradients, moves), abs=1e-5)
    assert_close(jax.jit(jax.jacfwd(value))(params, floats), gradients[0])


def test_under_other_transformations():
    _, value, params, floats = made(training=False)
    gradient = jax.jit(jax.grad(value))
    halves = jnp.stack([X[:4], X[4:]])
    each = jax.vmap(jax.grad(value), in_axes=(None, None, 0))(params, floats, halves)
    wanted = [gradient(params, floats, x) for x in halves]
    assert_close(each, jax.tree.map(lambda *xs: jnp.stack(xs), *wanted))
    assert_close(jax.grad(jax.checkpoint(value))(params, floats, X), gradient(params, floats, X))

    def scanned(params):
        return jax.lax.scan(lambda c, x: (c + value(params, floats, x), None), 0.0, halves)[0]

    assert_close(jax.jit(jax.grad(scanned))(params), jax.tree.map(jnp.add, *wanted))


def test_what_has_no_derivative_has_zeros():
    apply = on_jax.as_apply(Function(lambda x: (x.detach().sum(), x.argmax(), torch.ones(2))))
    _, slopes = jax.jvp(lambda x: apply({}, {}, x), (X,), (X,))
    assert slopes[0] == 0
    assert slopes[1].dtype == jax.dtypes.float0
    gradient = jax.grad(lambda x: apply({}, {}, x)[2].sum())(X)
    np.testing.assert_array_equal(gradient, np.zeros_like(X))


INTEGERS = {
    "sum": lambda y: y.sum(),
    "largest": lambda y: y.masked_fill(y > 1, torch.iinfo(y.dtype).max),
    "smallest": lambda y: torch.full_like(y, torch.iinfo(torch.int64).min),
    "places": lambda y: y.argmax(),
    "gathered": lambda y: y.gather(0, y),
}


def test_integers_have_64_bits_in_torch_and_32_in_jax():
    limits = np.iinfo(np.int32)
    for function in INTEGERS.values():
        found = on_jax.as_apply(Function(function))({}, {}, Y)
        assert found.dtype == jnp.int32
        wanted = function(torch.from_numpy(Y).long()).clamp(limits.min, limits.max)
        np.testing.assert_array_equal(found, wanted)
    for function in (lambda y: y + 2**40, lambda y: y + torch.tensor(2**40)):
        with pytest.raises(ValueError, match="32 bits"):
            on_jax.as_apply(Function(function))({}, {}, Y)
