"""The start of programs with replicas, and the training of a language model."""

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..slowmo import SlowMoDistributedDataParallel as Wrapper
from .model import LanguageModel, mean_loss
from .text import TextStream, standard_library, validation_batch


@contextmanager
def no_output() -> Iterator[None]:
    """Discard what the block prints: in torch 2.9 gloo prints a line in every process."""
    sys.stdout.flush()
    stdout = os.dup(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def prepare_to_spawn(options: argparse.Namespace) -> None:
    """Set devices and seed for `xmp.spawn`, and let Ctrl-C end its processes at once.

    Otherwise their threads would continue, and this process would wait for them.
    """
    from .. import runtime  # imported late, since torchrun needs no torch_xla

    warnings.simplefilter("once")  # not once per device
    torch.set_num_threads(1)  # OpenMP's threads do not survive the fork
    if options.cpu_devices:
        runtime.configure_cpu_devices(options.cpu_devices)
    torch.manual_seed(options.seed)
    parent = os.getpid()

    def handle(number: int, frame: object) -> None:
        if os.getpid() != parent:
            os._exit(1)
        sys.exit("Stopped by Ctrl-C.")

    signal.signal(signal.SIGINT, handle)


def run(net: Wrapper, options: argparse.Namespace, step: Callable[[Tensor], Tensor]) -> None:
    """Train a replica, and compare the mean of all replicas with the initial model.

    `net` wraps a `LanguageModel`. `step` trains it with tokens, int64 (batch, length), on its
    device, lets the replicas exchange, and returns the loss.
    """
    rank, world, text = net.process_rank, net.process_world_size, standard_library()
    samples = TextStream(text.train, length=options.length, seed=(options.seed, rank))
    validation = validation_batch(text.validation, num_samples=64, length=options.length)

    def validation_loss() -> float:
        state = net.consolidated_state_dict()  # an exchange: all replicas call it
        if rank != 0:
            return 0.0
        model = LanguageModel(options.config)
        model.load_state_dict(state)
        return mean_loss(model, validation)

    first_loss, begin = validation_loss(), time.perf_counter()
    batches, device = DataLoader(samples, options.batch_size), next(net.parameters()).device
    for number, batch in zip(range(1, options.steps + 1), batches, strict=False):
        loss = step(batch["input_ids"].to(device))
        if rank == 0 and number % 10 == 0:
            print(f"step {number}/{options.steps}: loss {loss.item():.3f}", flush=True)
    rate = options.steps * options.batch_size * world / (time.perf_counter() - begin)
    losses = f"{first_loss:.4f} -> {validation_loss():.4f} (mean of {world} replicas)"
    if rank == 0:
        print(
            f"validation loss {losses} in {options.steps} steps, {rate:.1f} samples/s", flush=True
        )
