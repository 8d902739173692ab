"""Options of the command lines, each declared once; an invalid value ends in an error message."""

import argparse
import math
from typing import Any

from .model import LanguageModelConfig

# The range of a value, both ends included, by the name of its option, or by its type.
_RANGES: dict[Any, tuple[float, float]] = {
    int: (1, math.inf),
    float: (0, math.inf),
    "cpu_devices": (1, 64),  # `runtime.MAX_CPU_DEVICES` cannot be imported without torch_xla
    "seed": (0, math.inf),
    "slowmo_momentum": (0, 0.999),
    "target_accuracy": (0, 100),
}
# Options of several programs, as (default, help). A tuple lists choices, the default first.
MODEL = {
    "length": (128, "tokens per sample"),
    "width": (192, "width of the model"),
    "layers": (2, "blocks of the model"),
    "heads": (6, "attention heads per block"),
}
SLOWMO = {
    "base": (("localsgd", "sgp"), "base algorithm"),
    "localsgd_frequency": (4, "localsgd: steps from one average to the next"),
    "slowmo_frequency": (16, "steps from one step of the slow momentum to the next"),
    "slowmo_momentum": (0.2, "slow momentum, in [0, 1)"),
    "nprocs_per_node": (1, "devices that average their gradients in every step"),
}
TRAINING = {
    "batch_size": (8, "samples per device"),
    "learning_rate": (2e-3, "learning rate, the highest where it changes"),
    "seed": (0, "seed of parameters and samples"),
}
STEPS = {"steps": (128, "steps of the optimizer, in all")}
XLA = {"cpu_devices": (None, "CPU devices to train on, instead of all XLA devices of the machine")}


class Parser(argparse.ArgumentParser):
    """A parser of groups of options, such as those above, for a module of this package."""

    def __init__(self, module: str, description: str | None, *groups: dict[str, tuple[Any, str]]):
        style = argparse.RawDescriptionHelpFormatter  # the description keeps its lines
        prog = f"python -m {__package__}.{module}"
        super().__init__(prog, description=description, formatter_class=style)
        for name, (default, text) in (option for group in groups for option in group.items()):
            kwargs: dict[str, Any] = {"action": "store_true"}
            if isinstance(default, tuple):
                kwargs = {"default": default[0], "choices": default}
            elif not isinstance(default, bool):
                kwargs = {"default": default, "type": _reader(name, default)}
            self.add_argument(f"--{name.replace('_', '-')}", help=f"{text} (%(default)s)", **kwargs)

    def parse(self, arguments: list[str] | None = None) -> argparse.Namespace:
        """Return the options, also as the model's `config` and as arguments `slowmo`, or exit."""
        options = self.parse_args(arguments)
        every = vars(options)
        options.slowmo = {name: every[name] for name in SLOWMO if name in every}
        options.slowmo["slowmo_base_algorithm"] = options.slowmo.pop("base", None)
        sizes = {name: every[name] for name in MODEL if name in every}
        options.config = LanguageModelConfig(**sizes)
        return options


def _reader(name: str, default: Any) -> Any:
    """Return a function that converts a value; argparse reports its errors."""
    kind = int if default is None else type(default)
    low, high = _RANGES.get(name) or _RANGES[kind]

    def read(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low:g} to {high:g}, got {text!r}")
        return value

    return read
