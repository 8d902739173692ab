"""Batches on XLA devices."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from torch_compat import TPUDataManager
from torch_compat.data import send_to_device


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
    assert moved == {
        "a": one,
        "b": [one, "x", (one, 3)],
        "c": Pair(one, 5),
        "d": Item(one, "y"),
    }
    assert transfers == [5]
    assert send_to_device("text", torch.device("xla")) == "text"


def test_what_a_device_cannot_ask_for():
    manager = TPUDataManager([], nprocs=1)
    device = torch.device("cpu")
    with pytest.raises(ValueError, match="`num_workers` must be 0"):
        manager.get_device_dataloader(index=0, device=device, num_workers=2)
    with pytest.raises(ValueError, match="`index` must be one of the 1 devices, got 1"):
        manager.get_device_dataloader(index=1, device=device)
