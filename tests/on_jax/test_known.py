"""Values of constants are known while a module is traced, and its program has no copies of them."""

from collections.abc import Callable

import jax
import models
import numpy as np
import pytest
import torch
from torch import nn

import jaxslowmo as js
from torch_compat import on_jax

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


class Calls(nn.Module):
    """`function(self, x)` as a module with a constant among its attributes."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.table, self.function = torch.arange(8), function
        self.register_buffer("buffer", torch.arange(8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.function(self, x)


def masked(module, x):
    even = torch.arange(8) % 2 == 0
    assert bool(even.any())
    assert even.sum().item() == 4
    assert int(even.sum()) == 4
    assert even[1:3].tolist() == [False, True]
    assert even.flatten().numpy().sum() == 4
    return x[:, even]


def written(module, x):
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[1:3, 2] = True
    mask[0, 0] = True
    mask |= torch.eye(4, 8, dtype=torch.bool)
    assert mask.sum() == 5
    assert x.reshape(*torch.tensor([2, 4]).tolist(), -1).shape == (2, 4, 4)
    mask[mask.clone()] = False
    assert not mask.any()
    mask.fill_(True)
    return x[mask]


def met(module, x):
    """A constant into which something traced is written is no constant any more."""
    table = torch.zeros(4, 8)
    assert table.sum() == 0
    table[:2] = x[:2]
    return table


def viewed(module, x):
    """Constants are read, and written, through views of them."""
    rows = torch.arange(6).view(2, 3)
    last = rows.t()[-1].detach()
    if int(last.sum()) == 7:
        rows.t()[0].copy_(last.flip(0))
    factor = rows.reshape(-1).tolist()[3] / 10 if last[1] == 5 else 2
    return x[: rows[0, 0].item()] * factor


@pytest.mark.parametrize("function", [viewed, masked, written, met])
def test_constants_have_values(function):
    module = Calls(lambda module, x: function(module, module.linear(x)))
    models.assert_as_torch(module, lambda m, x: (m(x) ** 2).sum(), X)


def test_in_a_step_over_replicas():
    """torch compares the mask with a causal one, and asks whether all of it is equal."""
    module = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    def loss(module, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return (module(x, x, tgt_mask=mask) ** 2).mean()

    batch = np.random.default_rng(0).normal(size=(4, 3, 8)).astype(np.float32)
    step, state = models.step_of(module, loss, sync=js.local_sgd("replica"))
    _, metrics = step(state, batch)
    values = [loss(module, torch.from_numpy(half)) for half in (batch[:2], batch[2:])]
    np.testing.assert_allclose(metrics["loss"], [value.item() for value in values], atol=1e-5)


UNKNOWN = {
    "after a random draw in place": lambda module, x: x * int(torch.ones(3).bernoulli_(0.5).sum()),
    "the batch": lambda module, x: x * x.sum().item(),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_depends_on_arguments_has_none(case):
    apply = jax.jit(on_jax.as_apply(Calls(UNKNOWN[case])))
    _, params, state = on_jax.as_loss(Calls(UNKNOWN[case]), lambda m, x: 0)
    with pytest.raises(ValueError, match="needs values that are not known"):
        apply(params, state, X, rng=jax.random.key(0))


def test_large_constants_stay_out_of_the_program():
    size = 1024

    def attends(module, x):
        mask = torch.full((size, size), float("-inf")).triu(1)
        if module.asks:
            assert mask.isinf().any()
            assert torch.ones(size, size, dtype=torch.bool).tril()[3, 2]
        return torch.softmax(x @ x.T + mask, -1) @ x

    sizes = {}
    for asks in (False, True):
        module = Calls(attends)
        module.asks = asks
        apply = on_jax.as_apply(module)
        _, params, state = on_jax.as_loss(module, lambda m, x: 0)
        x = np.ones((size, 2), np.float32)
        traced = jax.jit(apply).trace(params, state, x)
        compiled = traced.lower().compile()
        constants = sum(np.asarray(c).nbytes for c in traced.jaxpr.consts)
        memory = compiled.memory_analysis()
        sizes[asks] = constants, memory.argument_size_in_bytes, memory.temp_size_in_bytes
        assert len(traced.lower().as_text()) < 30_000
        assert memory.generated_code_size_in_bytes < size * size
    assert sizes[True] == sizes[False]
    assert sizes[True][0] < 1000
