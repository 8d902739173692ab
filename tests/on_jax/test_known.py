"""Values of constants are known while a module is traced, and its program has no copies of them."""

import jax
import models
import numpy as np
import pytest
import torch
from torch import nn
from views.differentiated import Function

from torch_compat import on_jax

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


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
    models.assert_as_torch(nn.Linear(8, 8), lambda m, x: (function(m, m(x)) ** 2).sum(), X)


UNKNOWN = {
    "after a random draw in place": lambda x: x * int(torch.ones(3).bernoulli_(0.5).sum()),
    "the batch": lambda x: x * x.sum().item(),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_depends_on_arguments_has_none(case):
    apply = jax.jit(on_jax.as_apply(Function(UNKNOWN[case])))
    with pytest.raises(ValueError, match="needs values that are not known"):
        apply({}, {}, X, rng=jax.random.key(0))


def test_large_constants_stay_out_of_the_program():
    size = 1024

    def attends(x, asks):
        mask = torch.full((size, size), float("-inf")).triu(1)
        if asks:
            assert mask.isinf().any()
            assert torch.ones(size, size, dtype=torch.bool).tril()[3, 2]
        return torch.softmax(x @ x.T + mask, -1) @ x

    sizes = {}
    for asks in (False, True):
        apply = on_jax.as_apply(Function(lambda x, asks=asks: attends(x, asks)))
        traced = jax.jit(apply).trace({}, {}, np.ones((size, 2), np.float32))
        memory = traced.lower().compile().memory_analysis()
        constants = sum(np.asarray(c).nbytes for c in traced.jaxpr.consts)
        sizes[asks] = constants, memory.argument_size_in_bytes, memory.temp_size_in_bytes
        assert len(traced.lower().as_text()) < 30_000
        assert memory.generated_code_size_in_bytes < size * size
    assert sizes[True] == sizes[False]
    assert sizes[True][0] < 1000
