"""Train a language model on real text with SlowMo: replicas that communicate rarely.

    python -m torch_compat.examples.train_slowmo --cpu-devices 2

Every device has its own samples and optimizer. At the end the mean of all replicas is compared with
the initial model.
"""

import argparse
import copy

import torch
import torch_xla
import torch_xla.distributed.xla_multiprocessing as xmp

from .. import runtime
from ..slowmo import SlowMoDistributedDataParallel
from .arguments import MODEL, SLOWMO, STEPS, TRAINING, XLA, Parser
from .model import LanguageModel
from .replicas import prepare_to_spawn, run

parse = Parser("train_slowmo", __doc__, XLA, STEPS, TRAINING, SLOWMO, MODEL).parse


def train(index: int, options: argparse.Namespace, model: LanguageModel) -> None:
    """Train a replica of the host's `model` on device `index` of this process."""
    # A copy, since several CPU devices are threads, which share `model`.
    replica = copy.deepcopy(model).to(torch_xla.device())
    replica.tie_weights()  # a move to an XLA device makes two tensors of tied ones
    net = SlowMoDistributedDataParallel(replica, **options.slowmo)
    # `capturable` counts steps on the device. A Python number would make every step a new graph,
    # and so would a learning rate that changes, unless it is a tensor.
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.learning_rate, capturable=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = net(input_ids=tokens, labels=tokens)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        net.perform_slowmo(optimizer)
        runtime.run_pending()
        return loss

    run(net, options, step)


if __name__ == "__main__":
    options = parse()
    prepare_to_spawn(options)
    # No device may be touched before the fork, so every process copies the model to its device.
    xmp.spawn(train, args=(options, LanguageModel(options.config)), start_method="fork")
