"""Attributes that are neither parameters nor buffers: constants, and never a leak."""

import jax
import numpy as np
import pytest
import torch
from torch import nn

from torch_compat import on_jax

X = np.arange(2.0, dtype=np.float32)


class Holds(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.inner = nn.Identity()
        self.inner.table = torch.tensor([2.0, 3.0])
        self.note = None
        self.change = change

    def forward(self, x):
        self.change(self.inner, self, x)
        return x * self.inner.table


def apply(change):
    module = Holds(change)
    table = module.inner.table
    try:
        return jax.jit(on_jax.as_apply(module))({}, {}, X)
    finally:
        assert module.inner.table is table
        assert table.tolist() == [2.0, 3.0]
        assert module.note is None
        assert not hasattr(module, "new")


def set_new(inner, module, x):
    module.note, module.new = x.sum(), x[:1]


def set_anew(inner, module, x):
    inner.table = x + 1  # of what is given alone, as weight norm does


def test_a_constant():
    np.testing.assert_array_equal(apply(lambda *_: None), [0.0, 3.0])


def test_what_a_call_leaves_behind_is_taken_away():
    np.testing.assert_array_equal(apply(set_new), [0.0, 3.0])


def test_what_is_computed_anew():
    np.testing.assert_array_equal(apply(set_anew), X * (X + 1))


def in_place(inner, module, x):
    inner.table.add_(x)


def carried(inner, module, x):
    inner.table = 0.9 * inner.table + x


@pytest.mark.parametrize("change", [in_place, carried])
def test_what_would_be_lost_is_named(change):
    with pytest.raises(ValueError, match=r"changes inner\.table, .*register_buffer"):
        apply(change)
