"""Which backend a wrapper takes by itself."""

import pytest
import slowmo_here as here
import torch
from slowmo_spawned import spawned

from torch_compat.slowmo.backends import _choose, choose


def chosen(names: list[str | None]) -> list[str]:
    return [choose(name, torch.nn.Linear(2, 2).to(here.device()), {}).name for name in names]


def test_each_in_its_place(by):
    expected = {"gloo": "torch.distributed", "torch_xla": "torch_xla"}[by]
    assert spawned(2, chosen, [None, expected], by=by) == [[expected] * 2] * 2


def test_nothing_to_choose(monkeypatch):
    monkeypatch.setattr(_choose, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"torch_xla.*torch.distributed"):
        choose(None, torch.nn.Linear(2, 2), {})
