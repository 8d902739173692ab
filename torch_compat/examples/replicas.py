"""What programs that train replicas of a language model have in common."""

import argparse
import time
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader

from ..slowmo import SlowMoDistributedDataParallel
from .model import loss_of_replicas
from .text import TextStream, standard_library, validation_batch


def train_replica(
    net: SlowMoDistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    options: argparse.Namespace,
    device: torch.device,
    *,
    rank: int,
    world: int,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Train one replica with its own samples; rank 0 says what the mean of all has learned.

    Args:
      net: a wrapped `LanguageModel`; its parameters are equal in all processes.
      optimizer: optimizer of its parameters.
      options: what `parse_training` returns.
      device: where the model is.
      rank: number of this replica, from 0.
      world: number of replicas.
      after_step: called after every step.
    """
    text = standard_library()
    samples = TextStream(text.train, length=options.length, seed=(options.seed, rank))
    batches = DataLoader(samples, batch_size=options.batch_size)
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
        after_step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}/{options.steps}: loss {loss.item():.3f}", flush=True)
    rate = options.steps * options.batch_size * world / (time.perf_counter() - begin)
    last = validation_loss()
    if rank == 0:
        print(
            f"validation loss {first:.4f} -> {last:.4f} (mean of {world} replicas) in "
            f"{options.steps} steps, {rate:.1f} samples/s",
            flush=True,
        )
