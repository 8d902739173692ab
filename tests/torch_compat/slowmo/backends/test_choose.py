"""Which connection a wrapper takes: it follows from the module's device and the process groups."""

import pytest
import slowmo_here as here
import torch
from slowmo_spawned import spawned

from torch_compat.slowmo import _options


def chosen() -> str:
    return _options.choose_backend(torch.nn.Linear(2, 2).to(here.device())).name


def test_each_in_its_place(by):
    expected = {"gloo": "torch.distributed", "torch_xla": "torch_xla"}[by]
    assert spawned(2, chosen, by=by) == [expected] * 2


def test_nothing_to_choose(monkeypatch):
    monkeypatch.setattr(_options, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"torch_xla.*torch.distributed"):
        _options.choose_backend(torch.nn.Linear(2, 2))
