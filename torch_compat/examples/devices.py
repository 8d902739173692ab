"""How programs on XLA devices start, and end."""

import argparse
import sys
import warnings
from collections.abc import Callable

import torch
import torch_xla.distributed.xla_multiprocessing as xmp

from .. import runtime
from .interrupt import end_forked_processes_at_once


def spawn(train: Callable[[int, argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Run `train(index, options)` for every device: all of this machine, or --cpu-devices."""
    if options.cpu_devices:
        runtime.configure_cpu_devices(options.cpu_devices)
    torch.manual_seed(options.seed)
    end_forked_processes_at_once()
    # No device may be touched before the fork.
    xmp.spawn(train, args=(options,), start_method="fork")


def run(main: Callable[[], None]) -> None:
    """Run a program; Ctrl-C ends it with a message and status 1."""
    warnings.simplefilter("once")  # not once per device
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped by Ctrl-C.")
