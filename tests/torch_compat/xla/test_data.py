"""Batches on XLA devices."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from torch_compat.xla_worker import send_to_device


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


@dataclass
class Item:
    a: torch.Tensor
    b: str


def test_structure_of_a_batch_is_kept(monkeypatch: pytest.MonkeyPatch):
    transfers = []

    def transfer(tensors, device):
        transfers.append(len(tensors))
        return [tensor + 1 for tensor in tensors]

    monkeypatch.setattr("torch_compat.runtime.to_device", transfer)
    zero, one = torch.zeros(1), torch.ones(1)
    batch = OrderedDict(a=zero, b=[zero, "x", (zero, 3)], c=Pair(zero, 5), d=Item(zero, "y"))
    moved = send_to_device(batch, torch.device("xla"))
    assert moved == {"a": one, "b": [one, "x", (one, 3)], "c": Pair(one, 5), "d": Item(one, "y")}
    assert transfers == [5]
    assert send_to_device("text", torch.device("xla")) == "text"
