"""Train a language model with SlowMo under torchrun, on GPUs or on the CPU, without torch_xla.

    torchrun --standalone --nproc-per-node 2 -m torch_compat.examples.train_torchrun

Every process trains a replica with its own samples and its own AdamW: over NCCL where there are
GPUs, one per process, otherwise over gloo. At the end the mean of all replicas is compared with
what they started from.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist

from ..slowmo import SlowMoDistributedDataParallel
from .arguments import parse_training, slowmo_arguments
from .model import LanguageModel, train_replica


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the program where it is wrong."""
    return parse_training("train_torchrun", __doc__, arguments, on_xla=False)


def join() -> torch.device:
    """Join the processes that torchrun has started; the device of this one.

    Raises:
      ValueError: more processes than GPUs on this machine, or not started by torchrun.
    """
    if "LOCAL_RANK" not in os.environ:
        raise ValueError("Start this program by torchrun, which tells processes of each other.")
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= gpus:
        raise ValueError(f"`--nproc-per-node` must be at most the GPUs here, {gpus}.")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def train(options: argparse.Namespace, device: torch.device) -> None:
    """What every process runs."""
    torch.manual_seed(options.seed)  # equal replicas
    net = SlowMoDistributedDataParallel(
        LanguageModel(options.config).to(device), **slowmo_arguments(options)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.learning_rate)
    train_replica(
        net, optimizer, options, device, rank=dist.get_rank(), world=dist.get_world_size()
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    options = parse(arguments)
    try:
        device = join()
    except ValueError as error:
        sys.exit(str(error))
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
