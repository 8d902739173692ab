"""Train a language model on real text: gradients from `TPUManager`, the optimizer on the host.

    python -m torch_compat.examples.train_tpu_manager --cpu-devices 2

Without --cpu-devices it uses all XLA devices of this machine. Ctrl-C stops after the step in
progress, with a checkpoint where --checkpoint names one.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from .. import TPUManager, runtime
from . import checkpoint, outer_hivemind
from .arguments import add_model, make_parser, model_config, natural, positive_float, positive_int
from .interrupt import Interrupt
from .model import LanguageModel, mean_loss
from .outer_hivemind import HivemindOptimizer
from .outer_optimizer import LocalOptimizer, OuterOptimizer
from .text import TextStream, standard_library, validation_batch


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the program where it is wrong."""
    parser = make_parser("train_tpu_manager", __doc__)
    add = parser.add_argument
    add("--steps", type=positive_int, default=60, help="of the optimizer, in all (%(default)s)")
    add("--batch-size", type=positive_int, default=8, help="samples per device (%(default)s)")
    add(
        "--grad-accumulation-steps",
        type=positive_int,
        default=1,
        help="forward passes per device before the gradients go to the host (%(default)s)",
    )
    add(
        "--accumulation-steps",
        type=positive_int,
        default=2,
        help="of those, on the host, before the optimizer's step (%(default)s)",
    )
    add("--learning-rate", type=positive_float, default=5e-3, help="the highest (%(default)s)")
    add_model(parser)
    add("--seed", type=natural, default=0, help="of parameters and order of samples (%(default)s)")
    add("--validate-every", type=positive_int, default=20, help="steps (%(default)s)")
    add("--checkpoint", type=Path, help="file; written at every validation and at the end")
    add("--resume", action="store_true", help="go on from --checkpoint")
    add("--optimizer", choices=("local", "hivemind"), default="local", help="(%(default)s)")
    add("--target-batch-size", type=positive_int, default=64, help="hivemind: samples of all peers")
    add("--run-id", default="torch_compat_example", help="hivemind: name of the common run")
    add("--initial-peers", nargs="*", default=[], help="hivemind: addresses to join")
    options = parser.parse_args(arguments)
    if options.resume and options.checkpoint is None:
        parser.error("argument --resume: needs --checkpoint, the file to go on from")
    if options.optimizer == "hivemind" and not outer_hivemind.is_installed():
        parser.error("argument --optimizer: hivemind is not installed (pip install hivemind)")
    try:
        options.config = model_config(options)
        options.state = checkpoint.load(options.checkpoint) if options.resume else None
        _check_fits(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _check_fits(options: argparse.Namespace) -> None:
    if options.state is None:
        return
    for name, wanted in {"config": vars(options.config), "outer": options.optimizer}.items():
        if options.state.get(name) != wanted:
            raise ValueError(
                f"{options.checkpoint} is of another run: its {name} is "
                f"{options.state.get(name)}, now {wanted} is asked for."
            )


def make_optimizer(model: LanguageModel, options: argparse.Namespace) -> OuterOptimizer:
    """The one that --optimizer names, for a model with the parameters to start from."""
    common = {"learning_rate": options.learning_rate, "total_steps": options.steps}
    if options.optimizer == "local":
        return LocalOptimizer(model, accumulation_steps=options.accumulation_steps, **common)
    outer = HivemindOptimizer(
        model,
        target_batch_size=options.target_batch_size,
        run_id=options.run_id,
        initial_peers=options.initial_peers,
        **common,
    )
    print("Others join with --initial-peers", *outer.addresses)
    return outer


def warm_up(manager: TPUManager, model: LanguageModel) -> None:
    """Three steps that leave nothing behind: what is compiled is compiled here."""
    manager.step()
    manager.update_model_parameters(model.parameters())
    manager.step()
    manager.step()
    manager.get_aggregated_gradients()
    manager.zero_grad()


class Outcome(NamedTuple):
    """What a run did; losses are those of the validation text, in nats per byte."""

    first_loss: float
    last_loss: float
    steps: int
    samples_per_second: float
    interrupted: bool


def train(
    manager: TPUManager,
    model: LanguageModel,
    outer: OuterOptimizer,
    options: argparse.Namespace,
    validation: torch.Tensor,
    samples_before: int,
) -> Outcome:
    """Up to --steps steps of the optimizer, or Ctrl-C."""
    first = mean_loss(model, validation)
    first_step, taken, trained, begin = outer.steps, 0, 0, time.perf_counter()

    def save() -> None:
        if options.checkpoint is not None:
            state = make_state(options, model, outer, samples_before + trained)
            checkpoint.save(options.checkpoint, state)

    with Interrupt() as interrupt, tqdm(total=options.steps, initial=first_step) as bar:
        while outer.steps < options.steps and not interrupt.requested:
            loss, num_samples = manager.step()
            taken += num_samples
            rate = taken / (time.perf_counter() - begin)
            bar.set_postfix(loss=f"{loss:.3f}", samples_per_second=f"{rate:.1f}")
            if not outer.after_step(num_samples):
                continue
            # Gradients that still wait for their step are lost with a checkpoint: it lets their
            # samples come again.
            trained = taken
            bar.update(outer.steps - bar.n)
            manager.update_model_parameters(model.parameters())
            manager.zero_grad()
            if outer.steps % options.validate_every == 0 and outer.steps < options.steps:
                loss = mean_loss(model, validation)
                bar.write(f"step {outer.steps}: validation loss {loss:.4f}")
                save()
    rate = taken / (time.perf_counter() - begin)
    save()
    last = mean_loss(model, validation)
    return Outcome(first, last, outer.steps - first_step, rate, interrupt.requested)


def make_state(
    options: argparse.Namespace, model: LanguageModel, outer: OuterOptimizer, samples: int
) -> dict[str, Any]:
    """All that a run needs to go on as if it had not stopped."""
    return {
        "config": vars(options.config),
        "outer": options.optimizer,
        "model": model.state_dict(),
        "optimizer": outer.state_dict(),
        "samples": samples,
        "rng": torch.get_rng_state(),
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    options = parse(arguments)
    torch.manual_seed(options.seed)
    text = standard_library()
    model = LanguageModel(options.config)
    samples_before = 0
    if options.state is not None:
        model.load_state_dict(options.state["model"])
        samples_before = options.state["samples"]
    outer = make_optimizer(model, options)
    if options.state is not None:
        outer.load_state_dict(options.state["optimizer"])
        torch.set_rng_state(options.state["rng"])
    validation = validation_batch(text.validation, num_samples=64, length=options.length)
    # The warm-up takes samples too. A run that goes on therefore begins as many samples earlier:
    # it was trained with `samples_before` samples after the first run's warm-up.
    samples = TextStream(text.train, length=options.length, seed=options.seed, skip=samples_before)
    try:
        with TPUManager(
            model,
            samples,
            nprocs=options.cpu_devices,
            batch_size_per_device=options.batch_size,
            grad_accumulation_steps=options.grad_accumulation_steps,
            # Random numbers of the devices: others than before the checkpoint.
            seed_base=options.seed + samples_before,
            start=True,
        ) as manager:
            print("Starting the devices ...", flush=True)
            warm_up(manager, model)
            kind = "CPU" if runtime.on_cpu() else "XLA"
            print(f"{manager.nprocs} {kind} devices, step {outer.steps} of {options.steps}.")
            outcome = train(manager, model, outer, options, validation, samples_before)
    finally:
        outer.close()
    print(
        f"validation loss {outcome.first_loss:.4f} -> {outcome.last_loss:.4f} in {outcome.steps} "
        f"steps, {outcome.samples_per_second:.1f} samples/s"
    )
    if outcome.interrupted:
        raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped by Ctrl-C.")
