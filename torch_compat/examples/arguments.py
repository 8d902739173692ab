"""What several programs ask on their command lines; a bad value ends in an error message."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from .model import LanguageModelConfig
from .text import VOCABULARY


def make_parser(
    program: str, description: str | None, *, on_xla: bool = True
) -> argparse.ArgumentParser:
    """A parser, that knows --cpu-devices for XLA devices; the description is printed as it is."""
    parser = argparse.ArgumentParser(
        prog=f"python -m torch_compat.examples.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if on_xla:
        parser.add_argument(
            "--cpu-devices",
            type=cpu_devices,
            metavar="N",
            help="train on N CPU devices, without TPU",
        )
    return parser


def add_slowmo(
    parser: argparse.ArgumentParser,
    *,
    localsgd_frequency: int = 4,
    slowmo_frequency: int = 16,
    slowmo_momentum: float = 0.2,
) -> None:
    """Options of `SlowMoDistributedDataParallel` with these defaults, for `slowmo_arguments`."""
    add = parser.add_argument
    add(
        "--base",
        choices=("localsgd", "sgp"),
        default="localsgd",
        help="base algorithm (%(default)s)",
    )
    add(
        "--localsgd-frequency",
        type=positive_int,
        default=localsgd_frequency,
        help="localsgd: steps from one average to the next (%(default)s)",
    )
    add(
        "--slowmo-frequency",
        type=positive_int,
        default=slowmo_frequency,
        help="steps from one step of the slow momentum to the next (%(default)s)",
    )
    add(
        "--slowmo-momentum",
        type=momentum,
        default=slowmo_momentum,
        help="in [0, 1) (%(default)s)",
    )
    add("--slowmo-lr", type=positive_float, default=1.0, help="(%(default)s)")
    add(
        "--slowmo-memory-efficient",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="shard the slow momentum over the devices",
    )
    add(
        "--nprocs-per-node",
        type=positive_int,
        default=1,
        help="devices that average their gradients in every step (%(default)s)",
    )


def slowmo_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """What `add_slowmo` asked for, as arguments of the class."""
    return {
        "nprocs_per_node": options.nprocs_per_node,
        "slowmo_base_algorithm": options.base,
        "slowmo_momentum": options.slowmo_momentum,
        "slowmo_memory_efficient": options.slowmo_memory_efficient,
        "slowmo_frequency": options.slowmo_frequency,
        "slowmo_lr": options.slowmo_lr,
        "localsgd_frequency": options.localsgd_frequency,
    }


def add_training(parser: argparse.ArgumentParser) -> None:
    """--steps, --batch-size, --learning-rate, --seed, and those of `add_model` and `add_slowmo`."""
    add = parser.add_argument
    add("--steps", type=positive_int, default=128, help="of every replica (%(default)s)")
    add("--batch-size", type=positive_int, default=8, help="samples per device (%(default)s)")
    add("--learning-rate", type=positive_float, default=2e-3, help="of AdamW (%(default)s)")
    add_slowmo(parser)
    add_model(parser)
    add("--seed", type=natural, default=0, help="of parameters and samples (%(default)s)")


def parse_training(
    parser: argparse.ArgumentParser, arguments: list[str] | None
) -> argparse.Namespace:
    """The options of `add_training`, with the model's sizes as `config`."""
    options = parser.parse_args(arguments)
    if "cpu_devices" in options:
        check_node_size(parser, options)
    try:
        options.config = model_config(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def check_node_size(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program where --nprocs-per-node does not divide --cpu-devices."""
    if options.cpu_devices and options.cpu_devices % options.nprocs_per_node:
        parser.error(
            f"argument --nprocs-per-node: must divide --cpu-devices, {options.cpu_devices}, "
            f"got {options.nprocs_per_node}"
        )


def add_model(parser: argparse.ArgumentParser) -> None:
    """--length, --width, --layers and --heads, for `model_config`."""
    add = parser.add_argument
    add("--length", type=positive_int, default=128, help="tokens per sample (%(default)s)")
    add("--width", type=positive_int, default=192, help="of the model (%(default)s)")
    add("--layers", type=positive_int, default=2, help="of the model (%(default)s)")
    add("--heads", type=positive_int, default=6, help="of attention per layer (%(default)s)")


def model_config(options: argparse.Namespace) -> LanguageModelConfig:
    """The model that is asked for.

    Raises:
      ValueError: for sizes that don't fit together.
    """
    return LanguageModelConfig(
        VOCABULARY, options.length, options.width, options.layers, options.heads
    )


def positive_int(text: str) -> int:
    """A whole number >= 1."""
    return _checked(text, int, lambda value: value >= 1, "a whole number >= 1")


def natural(text: str) -> int:
    """A whole number >= 0."""
    return _checked(text, int, lambda value: value >= 0, "a whole number >= 0")


def positive_float(text: str) -> float:
    """A finite number > 0."""
    return _checked(text, float, lambda value: 0 < value < math.inf, "a number > 0")


def percentage(text: str) -> float:
    """A number from 0 to 100."""
    return _checked(text, float, lambda value: 0 <= value <= 100, "a number from 0 to 100")


def momentum(text: str) -> float:
    """A number in [0, 1)."""
    return _checked(text, float, lambda value: 0 <= value < 1, "in [0, 1)")


def cpu_devices(text: str) -> int:
    """A number of CPU devices that a process can have."""
    # torchrun's program asks for none and may run where there is no torch_xla.
    from ..runtime import MAX_CPU_DEVICES

    rule = f"a whole number from 1 to {MAX_CPU_DEVICES}"
    return _checked(text, int, lambda value: 1 <= value <= MAX_CPU_DEVICES, rule)


def _checked(
    text: str, kind: Callable[[str], Any], allowed: Callable[[Any], bool], rule: str
) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not allowed(value):
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
    return value
