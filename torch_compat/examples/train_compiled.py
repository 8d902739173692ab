"""Train a language model by steps under `torch_xla.compile`, like pytorch/xla's examples.

    python -m torch_compat.examples.train_compiled --cpu-devices 1

Without --cpu-devices it uses all XLA devices of this machine. A step of a replica (forward and
backward pass and AdamW) is one program; `full_graph=True` makes torch_xla refuse to run anything
else in it. `perform_slowmo`, which runs programs of its own, follows outside. Several CPU devices
are threads of one process, which `full_graph=True` would keep from running anything at all: there
it is left out.
"""

import argparse
import itertools
import sys
import warnings

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch.utils.data import DataLoader

from .. import runtime
from ..slowmo import SlowMoDistributedDataParallel, broadcast_parameters
from .arguments import add_training, make_parser, parse_training, slowmo_arguments
from .interrupt import end_forked_processes_at_once
from .model import LanguageModel, loss_of_replicas
from .text import TextStream, standard_library, validation_batch


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the program where it is wrong."""
    parser = make_parser("train_compiled", __doc__)
    add_training(parser)
    return parse_training(parser, arguments)


class Trainer:
    """One replica, its optimizer and its samples.

    Args:
      options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.text = standard_library()
        self.device = torch_xla.device()
        model = LanguageModel(options.config).to(self.device)
        model.tie_weights()  # a move to an XLA device makes two tensors of tied ones
        broadcast_parameters(model)
        # Inside of a full graph no value can be read, so that nothing could be checked there.
        self.net = SlowMoDistributedDataParallel(
            model, check_start=False, **slowmo_arguments(options)
        )
        # `capturable` counts steps on the device; a number of Python would make every step a new
        # program.
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=options.learning_rate, capturable=True
        )
        self.compiled_step = torch_xla.compile(
            self.step, full_graph=not runtime.shares_a_process(), name="train_step"
        )

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of (batch, length) tokens; nothing in here leaves this replica."""
        loss = self.net(input_ids=tokens, labels=tokens)["loss"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def run(self) -> None:
        """All steps, and what the mean of the replicas has learned."""
        options, world = self.options, xr.world_size()
        samples = TextStream(
            self.text.train, length=options.length, seed=(options.seed, xr.global_ordinal())
        )
        loader = pl.MpDeviceLoader(DataLoader(samples, options.batch_size), self.device)
        tracker, first, compiled = xm.RateTracker(), self.validation_loss(), 0
        batches = itertools.islice(loader, options.steps)
        for step, batch in enumerate(batches, 1):
            loss = self.compiled_step(batch["input_ids"])
            self.net.perform_slowmo(self.optimizer)
            runtime.run_pending()
            tracker.add(options.batch_size * world)
            if step % 10 == 0:
                xm.master_print(f"step {step}: loss {loss.item():.3f}")
            if step == options.slowmo_frequency + 1:
                compiled = num_programs()
        rate, compiled = tracker.global_rate(), num_programs() - compiled
        last = self.validation_loss()
        xm.master_print(
            f"validation loss {first:.4f} -> {last:.4f} (mean of {world} replicas) in "
            f"{options.steps} steps, {rate:.1f} samples/s; {compiled} programs were compiled after "
            f"step {options.slowmo_frequency + 1}"
        )

    def validation_loss(self) -> float:
        """Of the mean of all replicas, on the first device; to be called for all."""
        options, is_first = self.options, xr.global_ordinal() == 0
        tokens = validation_batch(self.text.validation, num_samples=64, length=options.length)
        return loss_of_replicas(self.net, options.config, tokens, is_wanted=is_first)


def num_programs() -> int:
    """Programs that this process has compiled so far."""
    return (met.metric_data("CompileTime") or [0])[0]


def train(index: int, options: argparse.Namespace) -> None:
    """What every device runs; `index` is its number among those of its process."""
    torch.set_num_threads(1)  # OpenMP's threads do not survive the fork
    Trainer(options).run()


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    options = parse(arguments)
    if options.cpu_devices:
        runtime.configure_cpu_devices(options.cpu_devices)
    torch.manual_seed(options.seed)
    end_forked_processes_at_once()
    xmp.spawn(train, args=(options,), start_method="fork")


if __name__ == "__main__":
    warnings.simplefilter("once")  # not once per device
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped by Ctrl-C.")
