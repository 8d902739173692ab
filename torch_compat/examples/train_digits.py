"""Train a convolutional net on digits, as pytorch/xla's MNIST script does, with SlowMo.

    python -m torch_compat.examples.train_digits --cpu-devices 2

Every device trains a replica on its part of the pictures. There is no all-reduce of gradients
(`xm.optimizer_step`); the replicas are averaged every few steps. The program ends with an error if
the accuracy is below --target-accuracy.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch.utils.data import DataLoader, DistributedSampler

from .. import runtime
from ..slowmo import SlowMoDistributedDataParallel, broadcast_parameters
from .arguments import SLOWMO, TRAINING, XLA, Parser
from .digits import DigitNet, Digits
from .replicas import prepare_to_spawn

OPTIONS = {
    "epochs": (3, "passes over all pictures; the more devices, the fewer steps has each"),
    "train_samples": (4000, "pictures to train on, in all"),
    "test_samples": (1024, "pictures to test with, in all"),
    "target_accuracy": (97.0, "in percent"),
}
_PARSER = Parser("train_digits", __doc__, XLA, OPTIONS, TRAINING, SLOWMO)
_PARSER.set_defaults(batch_size=32, learning_rate=0.05)
parse = _PARSER.parse


def train(index: int, options: argparse.Namespace) -> None:
    """Train a replica on device `index` of this process."""
    device, accuracy = torch_xla.device(), 0.0
    model = DigitNet().to(device)
    # Threads share one random generator, so seeding it does not give equal replicas.
    broadcast_parameters(model)
    net = SlowMoDistributedDataParallel(model, **options.slowmo)
    optimizer = torch.optim.SGD(net.parameters(), lr=options.learning_rate, momentum=0.9)
    train_set = Digits(options.train_samples, seed=(options.seed, 0))
    test_set = Digits(options.test_samples, seed=(options.seed, 1))
    # Samplers give all devices the same number of batches: all must make the same calls.
    world, rank, size = xr.world_size(), xr.global_ordinal(), options.batch_size
    sampler = DistributedSampler(train_set, world, rank, seed=options.seed)
    # A last batch of another size would need another program.
    train_batches = DataLoader(train_set, size, sampler=sampler, drop_last=True)
    test_part = DistributedSampler(test_set, world, rank, shuffle=False)
    test_batches = DataLoader(test_set, size, sampler=test_part)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        net.train()
        # Moved from the host: a zero made on the device would be part of the first step's program.
        total, steps = torch.zeros(()).to(device), 0
        for pictures, digits in pl.MpDeviceLoader(train_batches, device):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(pictures), digits)
            loss.backward()
            optimizer.step()
            # Before perform_slowmo, since an exchange ends the program: it is then equal in all
            # steps.
            total, steps = total + loss.detach(), steps + 1
            net.perform_slowmo(optimizer)
            runtime.run_pending()
        loss = mean_over_devices(total, steps)
        accuracy = 100 * evaluate(net, pl.MpDeviceLoader(test_batches, device))
        xm.master_print(f"epoch {epoch + 1}: training loss {loss:.4f}, accuracy {accuracy:.2f} %")
    if accuracy < options.target_accuracy:
        sys.exit(f"Accuracy {accuracy:.2f} % is below the target, {options.target_accuracy} %.")


@torch.no_grad()
def evaluate(net: SlowMoDistributedDataParallel, batches: pl.MpDeviceLoader) -> float:
    """Return the accuracy over all digits; every replica classifies its own part of them."""
    net.eval()
    right, number = torch.zeros(()).to(torch_xla.device()), 0
    for pictures, digits in batches:
        right, number = right + (net(pictures).argmax(1) == digits).sum(), number + len(digits)
        runtime.run_pending()
    return mean_over_devices(right, number)


def mean_over_devices(total: torch.Tensor, number: int) -> float:
    """Return the mean over all devices; `xm.mesh_reduce` works on TPUs only."""
    values = torch.stack([total, torch.tensor(float(number)).to(total.device)])
    runtime.run_pending()
    runtime.meet()
    xm.all_reduce(xm.REDUCE_SUM, [values], pin_layout=False)
    runtime.run_pending()
    return values[0].item() / values[1].item()


if __name__ == "__main__":
    options = parse()
    prepare_to_spawn(options)
    xmp.spawn(train, args=(options,), start_method="fork")
