"""A module as a function: what comes back."""

import jax
import numpy as np
import pytest
import torch
from torch import nn

from torch_compat import on_jax

X = np.ones((3, 2), np.float32)


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x, **options):
        return self.make(x, **options)


def test_nested_results():
    apply = on_jax.as_apply(Returns(lambda x: {"a": (x, [x.sum(), None]), "b": 3, "c": x > 1}))
    out = jax.jit(apply)({}, {}, X)
    np.testing.assert_array_equal(out["a"][0], X)
    assert out["a"][1] == [6.0, None]
    assert (out["b"], out["c"].dtype) == (3, bool)


def test_arguments_by_name_and_python_values():
    apply = on_jax.as_apply(Returns(lambda x, scale, flag: x * scale if flag else x))
    np.testing.assert_array_equal(apply({}, {}, X, scale=2 * X, flag=True), 2 * X)
    np.testing.assert_array_equal(apply({}, {}, X, scale=X, flag=False), X)


@pytest.mark.parametrize(("make", "where"), [(lambda x: {1, 2}, ""), (lambda x: [object()], "[0]")])
def test_other_results_are_named(make, where):
    with pytest.raises(ValueError, match="as_apply: the result") as error:
        on_jax.as_apply(Returns(make))({}, {}, X)
    assert f"result{where} is a " in str(error.value)


def test_evaluation_leaves_statistics():
    module = nn.BatchNorm1d(2)
    _, params, state = on_jax.as_loss(module, lambda m, x: m(x).mean())
    module(torch.from_numpy(X))
    predict = jax.jit(on_jax.as_apply(module.eval()))
    state = {name: x + 1 for name, x in state.items()}
    wanted = (X - 1) / np.sqrt(2 + 1e-5)
    np.testing.assert_allclose(predict(params, state, X), wanted, atol=1e-6)
