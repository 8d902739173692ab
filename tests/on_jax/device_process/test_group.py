"""What `TPUManager`'s backend on jax says of devices, in a process whose jax has started.

How it trains is proved by tests/torch_compat/manager, in processes whose jax has not.
"""

import jax
import pytest
import torch

from torch_compat import TPUManager
from torch_compat.on_jax.device_process import is_started, open_devices


def test_all_devices_or_as_many_as_there_are():
    assert is_started()
    assert open_devices(None) == open_devices(8) == jax.local_devices()


def test_another_number_of_devices(monkeypatch):
    # As in a process in which a flag has made them.
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    with pytest.raises(ValueError, match=r"`nprocs` must be the number .* has, 8 \(.*\), got 3"):
        open_devices(3)


def test_a_process_that_has_started_jax_is_told_so():
    with pytest.raises(RuntimeError, match="This process has started jax"):
        TPUManager(torch.nn.Linear(2, 2), [], backend="torchax", start=False)
