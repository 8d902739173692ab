"""Which backend a wrapper takes by itself."""

import pytest
import slowmo_here as here
import torch
from slowmo_spawned import spawned

from torch_compat.slowmo.backends import _choose, choose

MODULE = torch.nn.Linear(2, 2)


def chosen(name: str | None) -> str:
    return choose(name, MODULE.to(here.device()), {}).name


def test_each_in_its_place(by):
    expected = {"gloo": "torch.distributed", "torch_xla": "torch_xla"}[by]
    assert spawned(2, chosen, None, by=by) == [expected] * 2
    assert spawned(2, chosen, expected, by=by) == [expected] * 2


def test_names():
    with pytest.raises(ValueError, match=r"`backend` must be None or 'torch_xla' or .* got 'gloo'"):
        choose("gloo", MODULE, {})


def test_nothing_to_choose(monkeypatch):
    monkeypatch.setattr(_choose, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"finds neither torch_xla nor an initialised"):
        choose(None, MODULE, {})
