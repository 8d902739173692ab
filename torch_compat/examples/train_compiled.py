"""Train a language model with steps under `torch_xla.compile`, like pytorch/xla's examples.

    python -m torch_compat.examples.train_compiled --cpu-devices 1

A step of a replica (forward and backward pass and AdamW) is one program; `full_graph=True` makes
torch_xla raise an error if the step would run a second one. `perform_slowmo` runs after it.
"""

import argparse
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.xla_multiprocessing as xmp

from .. import runtime
from ..slowmo import SlowMoDistributedDataParallel, broadcast_parameters
from .arguments import MODEL, SLOWMO, STEPS, TRAINING, XLA, Parser
from .model import LanguageModel
from .replicas import prepare_to_spawn, run

parse = Parser("train_compiled", __doc__, XLA, STEPS, TRAINING, SLOWMO, MODEL).parse


class Trainer:
    """A replica, its optimizer, and the number of programs compiled by the end of each step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.num_programs = torch_xla.device(), list[int]()
        model = LanguageModel(options.config).to(self.device)
        model.tie_weights()  # a move to an XLA device makes two tensors of tied ones
        broadcast_parameters(model)
        # A full graph cannot read values, so it cannot check that replicas start equal.
        self.net = SlowMoDistributedDataParallel(model, check_start=False, **options.slowmo)
        # `capturable` counts steps on the device; a number would make every step a new program.
        settings = {"lr": options.learning_rate, "capturable": True}
        self.optimizer = torch.optim.AdamW(self.net.parameters(), **settings)
        # Several CPU devices are threads of one process, and a full graph would block all of them.
        full_graph = not runtime.shares_a_process()
        self.compiled_step: Any = torch_xla.compile(self.local_step, full_graph=full_graph)

    def local_step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take a local step on (batch, length) tokens, without exchange, and return the loss."""
        loss = self.net(input_ids=tokens, labels=tokens)["loss"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take a local step, exchange with other replicas if it is due, and return the loss."""
        loss = self.compiled_step(tokens)
        self.net.perform_slowmo(self.optimizer)
        runtime.run_pending()
        self.num_programs.append((met.metric_data("CompileTime") or [0])[0])
        return loss


def train(index: int, options: argparse.Namespace) -> None:
    """Train a replica on device `index` of this process."""
    trainer, settled = Trainer(options), options.slowmo_frequency + 1
    run(trainer.net, options, trainer.step)
    number = trainer.num_programs[-1] - trainer.num_programs[:settled][-1]
    xm.master_print(f"{number} programs were compiled after step {settled}")


if __name__ == "__main__":
    options = parse()
    prepare_to_spawn(options)
    xmp.spawn(train, args=(options,), start_method="fork")
