"""Train a language model with SlowMo under torchrun, on GPUs or on the CPU, without torch_xla.

    torchrun --standalone --nproc-per-node 2 -m torch_compat.examples.train_torchrun

Every process trains a replica with its own samples and its own AdamW: over NCCL where there are
GPUs, one per process, otherwise over gloo. At the end the mean of all replicas is compared with
what they started from.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist

from ..slowmo import SlowMoDistributedDataParallel
from .arguments import add_training, make_parser, parse_training, slowmo_arguments
from .model import LanguageModel, loss_of_replicas
from .text import TextStream, standard_library, validation_batch


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the program where it is wrong."""
    parser = make_parser("train_torchrun", __doc__, on_xla=False)
    add_training(parser)
    return parse_training(parser, arguments)


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
    rank, world, text = dist.get_rank(), dist.get_world_size(), standard_library()
    torch.manual_seed(options.seed)  # equal replicas
    net = SlowMoDistributedDataParallel(
        LanguageModel(options.config).to(device), **slowmo_arguments(options)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.learning_rate)
    samples = TextStream(text.train, length=options.length, seed=(options.seed, rank))
    batches = torch.utils.data.DataLoader(samples, batch_size=options.batch_size)
    validation = validation_batch(text.validation, num_samples=64, length=options.length)

    def validation_loss() -> float:
        return loss_of_replicas(net, options.config, validation, is_wanted=rank == 0)

    first, begin = validation_loss(), time.perf_counter()
    for step, batch in zip(range(1, options.steps + 1), batches, strict=False):
        tokens = batch["input_ids"].to(device)
        loss = net(input_ids=tokens, labels=tokens)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        net.perform_slowmo(optimizer)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    rate = options.steps * options.batch_size * world / (time.perf_counter() - begin)
    last = validation_loss()
    if rank == 0:
        print(
            f"validation loss {first:.4f} -> {last:.4f} (mean of {world} replicas) in "
            f"{options.steps} steps, {rate:.1f} samples/s",
            flush=True,
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
