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
from tqdm import tqdm

from .. import TPUManager, runtime
from . import checkpoint
from .arguments import MODEL, STEPS, TRAINING, XLA, Parser
from .model import LanguageModel, mean_loss
from .outer_optimizer import LocalOptimizer
from .text import TextStream, standard_library, validation_batch

OPTIONS = {
    "grad_accumulation_steps": (1, "passes per device before gradients go to the host"),
    "accumulation_steps": (2, "of those, on the host, before the optimizer's step"),
    "validate_every": (20, "steps from one validation to the next"),
    "resume": (False, "resume from --checkpoint"),
}


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


def train(
    manager: TPUManager,
    model: LanguageModel,
    outer: LocalOptimizer,
    options: argparse.Namespace,
) -> None:
    """Train up to --steps steps of the optimizer `outer`, or until Ctrl-C."""
    text = standard_library().validation
    validation = validation_batch(text, num_samples=64, length=options.length)
    first_loss, first_step = mean_loss(model, validation), outer.steps
    taken, trained, begin = 0, options.state.get("samples", 0), time.perf_counter()

    def save() -> None:
        if options.checkpoint is not None:
            states = {"model": model.state_dict(), "optimizer": outer.state_dict()}
            checkpoint.save(options.checkpoint, {**states, "samples": trained, **options.run})

    interrupts, waiting = checkpoint.postpone_interrupt(), 0
    with tqdm(total=options.steps, initial=first_step) as bar:
        while outer.steps < options.steps and not interrupts:
            loss, num_samples = manager.step()
            taken, waiting = taken + num_samples, waiting + num_samples
            rate = taken / (time.perf_counter() - begin)
            bar.set_postfix(loss=f"{loss:.3f}", samples_per_second=f"{rate:.1f}")
            if not outer.after_step():
                continue
            # A checkpoint does not contain pending gradients: a resumed run repeats their samples.
            trained, waiting = trained + waiting, 0
            bar.update(outer.steps - bar.n)
            manager.update_model_parameters(model.parameters())
            manager.zero_grad()
            if outer.steps % options.validate_every == 0 and outer.steps < options.steps:
                loss = mean_loss(model, validation)
                bar.write(f"step {outer.steps}: validation loss {loss:.4f}")
                save()
    rate = taken / (time.perf_counter() - begin)
    save()
    losses = f"validation loss {first_loss:.4f} -> {mean_loss(model, validation):.4f}"
    print(f"{losses} in {outer.steps - first_step} steps, {rate:.1f} samples/s")
    if interrupts:
        raise KeyboardInterrupt


def main() -> None:
    """Run the program."""
    options = parse()
    torch.manual_seed(options.seed)
    text, model, state = standard_library().train, LanguageModel(options.config), options.state
    if state:
        model.load_state_dict(state["model"])
    outer = LocalOptimizer(model, options)
    if state:
        outer.load_state_dict(state["optimizer"])
    # `skip` counts samples of training only; the warm-up of every run takes some more.
    skip = state.get("samples", 0)
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
        print(f"{manager.nprocs} {kind} devices, step {outer.steps} of {options.steps}.")
        train(manager, model, outer, options)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped by Ctrl-C.")
