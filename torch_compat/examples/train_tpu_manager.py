"""Train a language model on real text: gradients from `TPUManager`, the optimizer on the host.

    python -m torch_compat.examples.train_tpu_manager --cpu-devices 2

Ctrl-C stops after the step in progress, and writes a checkpoint if there is --checkpoint.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from .. import TPUManager, runtime
from . import checkpoint
from .arguments import MODEL, STEPS, TRAINING, XLA, Parser
from .model import LanguageModel, mean_loss
from .text import TextStream, standard_library, validation_batch

OPTIONS = {
    "grad_accumulation_steps": (2, "passes per device before gradients go to the host"),
    "validate_every": (20, "steps from one validation to the next"),
    "resume": (False, "resume from --checkpoint"),
}

_PARTS = ("model", "optimizer", "scheduler")  # of a checkpoint, each with a `state_dict()`


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with the checkpoint to resume from as `state`, empty for a new run."""
    parser = Parser("train_tpu_manager", __doc__, XLA, STEPS, TRAINING, OPTIONS, MODEL)
    parser.set_defaults(steps=60, learning_rate=5e-3)
    parser.add_argument("--checkpoint", type=Path, help="file, written at every validation")
    options = parser.parse(arguments)
    if options.resume and options.checkpoint is None:
        parser.error("argument --resume: needs --checkpoint, the file to resume from")
    options.run = {"config": vars(options.config)}
    try:
        path = options.checkpoint
        options.state = checkpoint.load(path, **options.run) if options.resume else {}
    except ValueError as error:
        parser.error(str(error))
    return options


class Training:
    """AdamW on the host, and what a checkpoint holds."""

    def __init__(self, model: LanguageModel, options: argparse.Namespace):
        self.model, self.steps, self.samples = model, 0, 0
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        # Linear up in a tenth of the steps, then linear down to a tenth.
        rising, total = max(1, options.steps // 10), options.steps
        self.scheduler = LambdaLR(
            self.optimizer, lambda step: min((step + 1) / rising, max(0.1, 1 - step / total))
        )

    def step(self, num_samples: int) -> None:
        """Take the optimizer's step with the model's gradients, means over `num_samples`."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.steps, self.samples = self.steps + 1, self.samples + num_samples

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        parts = {name: getattr(self, name).state_dict() for name in _PARTS}
        return {**parts, "steps": self.steps, "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.steps, self.samples = state["steps"], state["samples"]


def train(manager: TPUManager, training: Training, options: argparse.Namespace) -> None:
    """Train up to --steps steps, or until Ctrl-C."""
    text, model = standard_library().validation, training.model
    validation = validation_batch(text, num_samples=64, length=options.length)
    first_loss, first_step = mean_loss(model, validation), training.steps
    first_sample, begin = training.samples, time.perf_counter()

    def rate() -> float:
        return (training.samples - first_sample) / (time.perf_counter() - begin)

    def save() -> None:
        if options.checkpoint is not None:
            checkpoint.save(options.checkpoint, {**training.state_dict(), **options.run})

    interrupts = checkpoint.postpone_interrupt()
    with tqdm(total=options.steps, initial=first_step) as bar:
        while training.steps < options.steps and not interrupts:
            loss, num_samples = manager.step()
            training.step(num_samples)
            manager.update_model_parameters(model.parameters())
            manager.zero_grad()
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", samples_per_second=f"{rate():.1f}")
            if training.steps % options.validate_every == 0 and training.steps < options.steps:
                loss = mean_loss(model, validation)
                bar.write(f"step {training.steps}: validation loss {loss:.4f}")
                save()
    speed = rate()
    save()
    losses = f"validation loss {first_loss:.4f} -> {mean_loss(model, validation):.4f}"
    print(f"{losses} in {training.steps - first_step} steps, {speed:.1f} samples/s")
    if interrupts:
        raise KeyboardInterrupt


def main() -> None:
    """Run the program."""
    options = parse()
    torch.manual_seed(options.seed)
    text, model = standard_library().train, LanguageModel(options.config)
    training = Training(model, options)
    if options.state:
        training.load_state_dict(options.state)
    # Those of training only; the warm-up of every run takes some more.
    skip = training.samples
    samples = TextStream(text, length=options.length, seed=options.seed, skip=skip)
    settings: dict[str, Any] = {
        "batch_size_per_device": options.batch_size,
        "grad_accumulation_steps": options.grad_accumulation_steps,
        "nprocs": options.cpu_devices,
        "seed_base": options.seed + skip,  # other random numbers than before the checkpoint
    }
    with TPUManager(model, samples, start=True, **settings) as manager:
        print("Starting the devices ...", flush=True)
        for _ in range(3):  # compiles all programs before time is measured
            manager.step()
            manager.update_model_parameters(model.parameters())
        manager.zero_grad()
        kind = "CPU" if runtime.on_cpu() else "XLA"
        print(f"{manager.nprocs} {kind} devices, step {training.steps} of {options.steps}.")
        train(manager, training, options)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped by Ctrl-C.")
