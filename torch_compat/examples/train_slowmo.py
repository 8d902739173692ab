"""Train a language model on real text with SlowMo: replicas that rarely talk to each other.

    python -m torch_compat.examples.train_slowmo --cpu-devices 2

Without --cpu-devices it uses all XLA devices of this machine. Every device has samples and an
optimizer of its own. At the end the mean of all replicas is compared with what they started from.
"""

import argparse

import torch
import torch_xla
import torch_xla.runtime as xr

from .. import runtime
from ..slowmo import SlowMoDistributedDataParallel, broadcast_parameters
from .arguments import parse_training, slowmo_arguments
from .devices import run, spawn
from .model import LanguageModel, train_replica


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the program where it is wrong."""
    return parse_training("train_slowmo", __doc__, arguments)


def train(index: int, options: argparse.Namespace) -> None:
    """What every device runs; `index` is its number among those of its process."""
    torch.set_num_threads(1)  # OpenMP's threads do not survive the fork
    device = torch_xla.device()
    model = LanguageModel(options.config).to(device)
    model.tie_weights()  # a move to an XLA device makes two tensors of tied ones
    # Threads share one random generator, so that seeding it does not give equal replicas.
    broadcast_parameters(model)
    net = SlowMoDistributedDataParallel(model, **slowmo_arguments(options))
    # `capturable` counts steps on the device; a number of Python would make every step a new
    # graph, and so would a learning rate that changes, unless it is a tensor.
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.learning_rate, capturable=True)
    train_replica(
        net,
        optimizer,
        options,
        device,
        rank=xr.global_ordinal(),
        world=xr.world_size(),
        after_step=runtime.run_pending,
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    spawn(train, parse(arguments))


if __name__ == "__main__":
    run(main)
