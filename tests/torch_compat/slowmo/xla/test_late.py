"""A device that comes late to an exchange, or never."""

import sys
import warnings

import pytest
import torch
import torch_xla
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from slowmo_models import Perceptron, train_step, values
from slowmo_spawned import spawned

from support.waiting import wait_until
from torch_compat import meeting, runtime
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

WIDTH = 8


def waits_in_a_meeting() -> bool:
    """Whether a thread of this process is in `Meeting.wait`, where it may stay for long."""
    codes = []
    for frame in sys._current_frames().values():
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
    return meeting.Meeting.wait.__code__ in codes


def skewed():
    """Process 0 evaluates, saves or compiles for as long as it takes.

    XLA's CPU runtime ends the process when a device has waited in a collective for 15 s.
    """
    net = SlowMo(
        Perceptron(WIDTH, 6).to(torch_xla.device()), nprocs_per_node=1, localsgd_frequency=1
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train_step(net, optimizer, 0, WIDTH)
    if xr.global_ordinal() == 0:
        wait_until(waits_in_a_meeting)
    train_step(net, optimizer, 1, WIDTH)
    return values(net.module)["w1"].tolist()


def test_a_device_that_is_early_waits_outside_of_xla():
    first, second = spawned(2, skewed, by="torch_xla")
    assert first == second


def failing(index):
    warnings.simplefilter("ignore")
    meeting.NOTICE_SECONDS = 1000.0
    net = SlowMo(
        Perceptron(WIDTH, 6).to(torch_xla.device()), nprocs_per_node=1, localsgd_frequency=1
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train_step(net, optimizer, 0, WIDTH)
    if xr.global_ordinal() == 1:
        raise ValueError("bad sample in process 1")
    train_step(net, optimizer, 1, WIDTH)


def test_an_exception_ends_the_others_and_is_not_lost():
    runtime.configure_cpu_devices(2)
    with pytest.raises(Exception, match=r"Process 1 of 2 will not take part") as caught:
        xmp.spawn(failing, start_method="fork")
    # What the pool hands to the parent: the waiting process' error, and its cause.
    assert "bad sample in process 1" in str(caught.value.__cause__)
