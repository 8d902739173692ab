"""Train a language model on real text with SlowMo: replicas that communicate rarely.

    python -m torch_compat.examples.train_slowmo --cpu-devices 2

Every device has its own samples and optimizer. At the end the mean of all replicas is compared with
the initial model. With --compiled a step of a replica (forward and backward pass and AdamW) goes
through `torch_xla.compile`, as in pytorch/xla's examples.
"""

import argparse
import copy
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.xla_multiprocessing as xmp

from .. import runtime
from ..slowmo import SlowMoDistributedDataParallel
from .arguments import MODEL, SLOWMO, STEPS, TRAINING, XLA, Parser
from .model import LanguageModel
from .replicas import prepare_to_spawn, run

OPTIONS = {"compiled": (False, "one program per step, in a full graph if one device has a process")}
parse = Parser("train_slowmo", __doc__, XLA, STEPS, OPTIONS, TRAINING, SLOWMO, MODEL).parse


def train(index: int, options: argparse.Namespace, model: LanguageModel) -> None:
    """Train a replica of the host's `model` on device `index` of this process."""
    # A copy, since several CPU devices are threads, which share `model`.
    replica = copy.deepcopy(model).to(torch_xla.device())
    replica.tie_weights()  # a move to an XLA device makes two tensors of tied ones
    net = SlowMoDistributedDataParallel(replica, **options.slowmo)
    # `capturable` counts steps on the device. A Python number would make every step a new graph,
    # and so would a learning rate that changes, unless it is a tensor.
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.learning_rate, capturable=True)
    num_programs: list[int] = []  # compiled by the end of each step

    def local_step(tokens: torch.Tensor) -> torch.Tensor:
        loss = net(input_ids=tokens, labels=tokens)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    # Several CPU devices are threads of one process, and a full graph would block all of them.
    full_graph = not runtime.shares_a_process()
    compiled: Any = torch_xla.compile(local_step, full_graph=full_graph)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = compiled(tokens) if options.compiled else local_step(tokens)
        net.perform_slowmo(optimizer)
        runtime.run_pending()
        num_programs.append((met.metric_data("CompileTime") or [0])[0])
        return loss

    run(net, options, step)
    settled = options.slowmo_frequency + 1
    number = num_programs[-1] - num_programs[:settled][-1]
    xm.master_print(f"{number} programs were compiled after step {settled}")


if __name__ == "__main__":
    options = parse()
    prepare_to_spawn(options)
    # No device may be touched before the fork, so every process copies the model to its device.
    xmp.spawn(train, args=(options, LanguageModel(options.config)), start_method="fork")
