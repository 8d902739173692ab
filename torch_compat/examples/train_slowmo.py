"""Train a language model on real text with SlowMo: replicas that rarely talk to each other.

    python -m torch_compat.examples.train_slowmo --cpu-devices 2

Without --cpu-devices it uses all XLA devices of this machine. Every device has samples and an
optimizer of its own. At the end the mean of all replicas is compared with what they started from.
"""

import argparse
import sys
import time
import warnings

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch import nn
from tqdm import tqdm

from .. import runtime
from ..slowmo import SlowMoDistributedDataParallel
from .arguments import add_training, make_parser, parse_training, slowmo_arguments
from .interrupt import end_forked_processes_at_once
from .model import LanguageModel, mean_loss
from .text import Text, TextStream, standard_library, validation_batch


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the program where it is wrong."""
    parser = make_parser("train_slowmo", __doc__)
    add_training(parser)
    return parse_training(parser, arguments)


def train(index: int, options: argparse.Namespace, model: LanguageModel, text: Text) -> None:
    """What every device runs; `index` is its number among those of its process.

    The model comes with the same parameters for all.
    """
    torch.set_num_threads(1)  # OpenMP's threads do not survive the fork
    device, rank, world = torch_xla.device(), xr.global_ordinal(), xr.world_size()
    validation = validation_batch(text.validation, num_samples=64, length=options.length)
    first = mean_loss(model, validation) if rank == 0 else 0.0
    replica = LanguageModel(options.config)
    replica.load_state_dict(model.state_dict())
    replica.to(device).tie_weights()  # a move to an XLA device makes two tensors of tied ones
    net = SlowMoDistributedDataParallel(replica, **slowmo_arguments(options))
    # `capturable` counts steps on the device; a number of Python would make every step a new
    # graph, and so would a learning rate that changes, unless it is a tensor.
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.learning_rate, capturable=True)
    samples = TextStream(text.train, length=options.length, seed=(options.seed, rank))
    batches = torch.utils.data.DataLoader(samples, batch_size=options.batch_size)
    rate, begin = 0.0, time.perf_counter()
    with tqdm(total=options.steps, disable=rank != 0) as bar:
        for step, batch in zip(range(1, options.steps + 1), batches, strict=False):
            tokens = batch["input_ids"].to(device)
            loss = net(input_ids=tokens, labels=tokens)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            net.perform_slowmo(optimizer)
            runtime.run_pending()
            bar.update()
            if rank == 0 and (step % 10 == 0 or step == options.steps):
                rate = step * options.batch_size * world / (time.perf_counter() - begin)
                bar.set_postfix(loss=f"{loss.item():.3f}", samples_per_second=f"{rate:.1f}")
    load_mean(model, net.module)
    if rank == 0:
        last = mean_loss(model, validation)
        print(
            f"validation loss {first:.4f} -> {last:.4f} (mean of {world} replicas) in "
            f"{options.steps} steps, {rate:.1f} samples/s",
            flush=True,
        )


def load_mean(model: nn.Module, replica: nn.Module) -> None:
    """Load the mean of all devices' replicas into a model on the host.

    To be called for all devices; one all-reduce of the parameters.
    """
    runtime.run_pending()
    runtime.meet()
    with torch.no_grad():
        means = [parameter.clone() for parameter in replica.parameters()]
        xm.all_reduce(xm.REDUCE_SUM, means, scale=1 / xr.world_size(), pin_layout=False)
        runtime.run_pending()
        for parameter, mean in zip(model.parameters(), means, strict=True):
            parameter.copy_(mean.cpu())


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    options = parse(arguments)
    if options.cpu_devices:
        runtime.configure_cpu_devices(options.cpu_devices)
    torch.manual_seed(options.seed)
    model, text = LanguageModel(options.config), standard_library()
    end_forked_processes_at_once()
    # No device may be touched before the fork; so every process makes its own.
    xmp.spawn(train, args=(options, model, text), start_method="fork")


if __name__ == "__main__":
    warnings.simplefilter("once")  # not once per device
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped by Ctrl-C.")
