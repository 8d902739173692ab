"""What `TPUManager`'s backend on jax says of devices, in a process whose jax has started.

How it trains is proved by tests/torch_compat/manager, in processes whose jax has not.
"""

import jax
import torch

from support.refusals import Refusal
from torch_compat import TPUManager
from torch_compat.on_jax._mesh_program import MeshProgram
from torch_compat.on_jax.device_process import open_devices


def test_all_devices_or_as_many_as_there_are(monkeypatch):
    assert open_devices(None) == open_devices(8) == jax.local_devices()
    # As in a process in which a flag has made them.
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    Refusal(lambda: open_devices(3), "`nprocs`", "got 3").check()


def test_a_process_that_has_started_jax_is_told_so():
    def start():
        TPUManager(torch.nn.Linear(2, 2), [], backend="torchax", start=False)

    Refusal(start, "jax", error=RuntimeError).check()


def test_integers_of_a_batch_that_do_not_fit_are_refused():
    program = MeshProgram(
        torch.nn.Linear(4, 3), jax.devices(), seed_base=0, micro_batches=1, compress=False
    )
    for number in (2**31, -(2**31) - 1):
        Refusal(lambda number=number: program.add([torch.tensor([number])] * 8), "32 bits").check()
