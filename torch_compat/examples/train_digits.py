"""Train a convolutional net on digits, as pytorch/xla's MNIST script does, with SlowMo.

    python -m torch_compat.examples.train_digits --cpu-devices 2

Without --cpu-devices it uses all XLA devices of this machine. Every device trains a replica on its
part of the pictures; there is no all-reduce of gradients (`xm.optimizer_step`), the replicas come
together every few steps. Ends with an error where the accuracy is below --target-accuracy.
"""

import argparse
import sys
import time
import warnings

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch.utils.data import DataLoader, DistributedSampler

from .. import runtime
from ..slowmo import SlowMoDistributedDataParallel, broadcast_parameters
from .arguments import (
    add_slowmo,
    check_node_size,
    make_parser,
    natural,
    percentage,
    positive_float,
    positive_int,
    slowmo_arguments,
)
from .digits import DigitNet, Digits
from .interrupt import end_forked_processes_at_once


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the program where it is wrong."""
    parser = make_parser("train_digits", __doc__)
    add = parser.add_argument
    add(
        "--epochs",
        type=positive_int,
        default=3,
        help="(%(default)s); the more devices, the fewer steps has each",
    )
    add("--batch-size", type=positive_int, default=32, help="pictures per device (%(default)s)")
    add("--learning-rate", type=positive_float, default=0.05, help="of SGD (%(default)s)")
    add("--train-samples", type=positive_int, default=4000, help="in all (%(default)s)")
    add("--test-samples", type=positive_int, default=1024, help="in all (%(default)s)")
    add("--target-accuracy", type=percentage, default=97.0, help="in percent (%(default)s)")
    add("--log-steps", type=positive_int, default=20, help="steps between lines (%(default)s)")
    add("--metrics", action="store_true", help="print torch_xla's counts at the end")
    add_slowmo(parser)
    add("--seed", type=natural, default=0, help="of parameters and pictures (%(default)s)")
    options = parser.parse_args(arguments)
    check_node_size(parser, options)
    if options.cpu_devices and options.train_samples < options.batch_size * options.cpu_devices:
        parser.error(
            f"argument --train-samples: must be a batch for every device, "
            f"{options.batch_size * options.cpu_devices}, got {options.train_samples}"
        )
    return options


def train(index: int, options: argparse.Namespace) -> None:
    """What every device runs; `index` is its number among those of its process."""
    torch.set_num_threads(1)  # OpenMP's threads do not survive the fork
    device = torch_xla.device()
    pictures = Digits(options.train_samples, seed=(options.seed, 0))
    train_loader, train_sampler = loader_of(pictures, options, is_training=True)
    test_loader, _ = loader_of(
        Digits(options.test_samples, seed=(options.seed, 1)), options, is_training=False
    )
    model = DigitNet().to(device)
    # Threads share one random generator, so that seeding it does not give equal replicas.
    broadcast_parameters(model)
    net = SlowMoDistributedDataParallel(model, **slowmo_arguments(options))
    optimizer = torch.optim.SGD(net.parameters(), lr=options.learning_rate, momentum=0.9)
    accuracy = 0.0
    for epoch in range(options.epochs):
        train_sampler.set_epoch(epoch)
        loss = train_epoch(net, optimizer, pl.MpDeviceLoader(train_loader, device), options)
        accuracy = evaluate(net, pl.MpDeviceLoader(test_loader, device))
        xm.master_print(f"epoch {epoch + 1}: training loss {loss:.4f}, accuracy {accuracy:.2f} %")
    if options.metrics:
        xm.master_print(met.short_metrics_report())
    if accuracy < options.target_accuracy:
        sys.exit(f"Accuracy {accuracy:.2f} % is below the target, {options.target_accuracy} %.")


def loader_of(
    data: Digits, options: argparse.Namespace, *, is_training: bool
) -> tuple[DataLoader, DistributedSampler]:
    """This device's part; as many batches on all devices, since all must make the same calls."""
    sampler = DistributedSampler(
        data,
        num_replicas=xr.world_size(),
        rank=xr.global_ordinal(),
        shuffle=is_training,
        seed=options.seed,
    )
    # A last batch of another size would be another program.
    loader = DataLoader(data, options.batch_size, sampler=sampler, drop_last=is_training)
    return loader, sampler


def train_epoch(
    net: SlowMoDistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    loader: pl.MpDeviceLoader,
    options: argparse.Namespace,
) -> float:
    """The mean loss over all devices."""
    net.train()
    # From the host: made on the device, a zero would be part of the first step's program.
    tracker, total, number = xm.RateTracker(), torch.zeros(()).to(torch_xla.device()), 0
    for step, (pictures, digits) in enumerate(loader, 1):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(pictures), digits)
        loss.backward()
        optimizer.step()
        # Before perform_slowmo, where an exchange ends the program: it is the same in every step.
        total, number = total + loss.detach(), number + 1
        net.perform_slowmo(optimizer)
        runtime.run_pending()
        tracker.add(options.batch_size * xr.world_size())
        if step % options.log_steps == 0:
            xm.master_print(
                f"{time.strftime('%H:%M:%S')} step {step}: loss {loss.item():.4f}, "
                f"{tracker.rate():.0f} pictures/s"
            )
    loss, steps = sum_over_devices(total, number)
    return loss / steps


@torch.no_grad()
def evaluate(net: SlowMoDistributedDataParallel, loader: pl.MpDeviceLoader) -> float:
    """Percent of digits that are read right; every device's replica reads its part."""
    net.eval()
    right, number = torch.zeros(()).to(torch_xla.device()), 0
    for pictures, digits in loader:
        right = right + (net(pictures).argmax(1) == digits).sum()
        number += len(digits)
        runtime.run_pending()
    right, number = sum_over_devices(right, number)
    return 100 * right / number


def sum_over_devices(value: torch.Tensor, number: int) -> tuple[float, float]:
    """Both summed over all devices, on all of them; what `xm.mesh_reduce` is for elsewhere.

    Several CPU devices cannot do `xm.mesh_reduce`; this they can.
    """
    values = torch.stack([value, torch.tensor(float(number)).to(value.device)])
    runtime.run_pending()
    runtime.meet()
    xm.all_reduce(xm.REDUCE_SUM, [values], pin_layout=False)
    runtime.run_pending()
    total, count = values.tolist()
    return total, count


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
