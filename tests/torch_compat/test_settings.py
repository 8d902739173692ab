"""Settings of a module are read, compared, and set on a copy."""

import copy
import math

import numpy
import torch
from torch import nn

from torch_compat.settings import Changes, Settings


def network() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    module.scale, module.tensor, module.shapes = 1.0, torch.ones(2), (1, (2, "a"))
    return module


def test_what_has_not_changed_is_empty():
    module = network()
    module.limit = math.nan
    settings = Settings(module)
    module.tensor = torch.zeros(2)
    assert not settings.changes()


def test_only_changes_are_set_on_a_copy():
    module = network()
    replica, settings = copy.deepcopy(module), Settings(module)
    replica.counted = 5  # by the replica's own forward pass
    module.scale, module.shapes, module[1].p = 2.0, (1, None), 0.1
    module[0].weight.requires_grad_(False)
    module[1].eval()
    changes = settings.changes()
    assert changes == (
        {"0.weight": False},
        {"scale": 2.0, "shapes": (1, None), "1.training": False, "1.p": 0.1},
    )
    changes.apply(replica)
    assert (replica.scale, replica.shapes, replica[1].p) == (2.0, (1, None), 0.1)
    assert not replica[1].training
    assert replica[0].training
    assert not replica[0].weight.requires_grad
    assert replica.counted == 5


def test_a_number_of_another_type_is_a_change():
    module = network()
    settings = Settings(module)
    module.scale = True
    assert settings.changes() == ({}, {"scale": True})


def test_what_a_copy_lacks_is_left_out():
    Changes({"gone": True}, {"gone.scale": 1.0}).apply(network())


def test_parts_that_were_replaced_are_looked_at():
    module = network()
    settings = Settings(module)
    module[0] = nn.Linear(2, 2)
    assert not settings.changes()
    module[0].weight.requires_grad_(False)
    module[0].eval()
    assert settings.changes() == ({"0.weight": False}, {"0.training": False})


def test_numbers_of_numpy():
    module = network()
    settings = Settings(module)
    module.scale = numpy.float32(1.0)
    assert not settings.changes()
    module.scale = numpy.float32(0.5)
    assert settings.changes() == ({}, {"scale": numpy.float32(0.5)})
