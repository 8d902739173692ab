"""What both programs ask on their command lines; a bad value ends in an error message."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from ..runtime import MAX_CPU_DEVICES
from .model import LanguageModelConfig
from .text import VOCABULARY


def make_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """A parser that knows --cpu-devices; the description is printed as it is."""
    parser = argparse.ArgumentParser(
        prog=f"python -m torch_compat.examples.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cpu-devices", type=cpu_devices, metavar="N", help="train on N CPU devices, without TPU"
    )
    return parser


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


def cpu_devices(text: str) -> int:
    """A number of CPU devices that a process can have."""
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
