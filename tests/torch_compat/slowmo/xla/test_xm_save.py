"""A state dict through torch_xla's own `xm.save`."""

import numpy as np
import torch_xla.core.xla_model as xm
from slowmo_spawned import spawned
from test_state import resumed


def test_through_xm_save():
    # Alone, for its rendezvous aborts several CPU devices.
    for undisturbed, again in spawned(1, resumed, "sharded", [7], xm.save, by="torch_xla"):
        for key, value in undisturbed.items():
            assert np.array_equal(value, again[key]), key
