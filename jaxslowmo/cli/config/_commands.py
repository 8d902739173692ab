"""Configurations of `jaxslowmo compare`, `sample` and `tune`."""

import dataclasses
import typing
from typing import Any

from ._algorithms import ALGORITHMS, AlgorithmConfig
from ._fields import (
    Checked,
    option,
    options_of,
    parse_integers,
    parse_names,
    parse_size,
    parse_sizes,
)
from ._options import check_setting
from ._training import MOST_SEEDS, TrainConfig

_SYMBOLS = 256  # the models read and write bytes


@dataclasses.dataclass(frozen=True)
class CompareConfig(Checked):
    """Several algorithms, each trained with every seed; all else is equal.

    An algorithm may bring settings of its own: "sgp+overlap=1+graph=ring".
    """

    train: TrainConfig
    algorithms: tuple[str, ...] = option(
        "all_reduce,local_sgd,slowmo",
        "Separated by commas; the ratios are to the first. Each may bring settings: "
        "sgp+overlap=1+graph=ring.",
        parse=parse_names,
    )
    seeds: tuple[int, ...] = option(
        "0", "Separated by commas.", parse=parse_integers, least=0, below=MOST_SEEDS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [name for name in self.base_algorithms if name not in ALGORITHMS]
        if unknown:
            raise ValueError(
                f"--algorithms must be of {', '.join(ALGORITHMS)}, got {', '.join(unknown)}"
            )
        for algorithm in self.algorithms:
            try:
                self.run(algorithm, self.seeds[0])  # its settings are checked, too
            except ValueError as error:
                raise ValueError(f"--algorithms {algorithm}: {error}") from None

    @property
    def base_algorithms(self) -> tuple[str, ...]:
        """The algorithms without their settings."""
        return tuple(algorithm.partition("+")[0] for algorithm in self.algorithms)

    def run(self, algorithm: str, seed: int) -> TrainConfig:
        """The configuration of one of the runs."""
        name, *settings = algorithm.split("+")
        changes = dict(_setting(text) for text in settings)
        for setting, value in changes.items():
            check_setting(name, setting, value)
        return dataclasses.replace(
            self.train,
            seed=seed,
            algorithm=dataclasses.replace(self.train.algorithm, algorithm=name, **changes),
        )


def _setting(text: str) -> tuple[str, Any]:
    """Name and value of "overlap=1"."""
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    settings = options_of(AlgorithmConfig)
    if not equals or name == "algorithm" or name not in settings:
        known = ", ".join(key for key in settings if key != "algorithm")
        raise ValueError(f"settings are written name+SETTING=VALUE with {known}, got {text!r}")
    return name, _parse(name, settings[name].type, value)


def _parse(name: str, kind: Any, text: str) -> Any:
    kinds = set(typing.get_args(kind)) - {type(None)} or {kind}
    (kind,) = kinds
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"{name} must be of type {kind.__name__}, got {text!r}") from None


@dataclasses.dataclass(frozen=True)
class SampleConfig(Checked):
    """What to write, and how freely."""

    step: int | None = option(
        None, "Of the checkpoint to take the model from (default: the newest).", least=0
    )
    prompt: str = option(
        "\n",
        "Text to go on from, of which the model sees the end (default: a new line).",
        shows_default=False,
    )
    tokens: int = option(200, "Bytes to write.", least=1, below=2**20)
    temperature: float = option(
        0.8,
        "1 draws bytes as the model rates them, less prefers the likely, 0 takes the likeliest.",
        least=0,
    )
    top_k: int = option(
        0, "Draw from so many of the likeliest bytes; 0: all.", least=0, below=_SYMBOLS + 1
    )
    seed: int = option(0, "Of the drawing: the same text every time.", least=0, below=MOST_SEEDS)


ORDERS = ("reverse", "forward", "ready")


@dataclasses.dataclass(frozen=True)
class TuneBucketsConfig(Checked):
    """Bucket limits to measure.

    Attributes:
      train: model, batch, optimizer and devices.
      limits: bytes at which a bucket closes; 0, one bucket per gradient, is measured besides.
      first: bytes of the first bucket, where the limit is not below.
      order: in which gradients go into buckets.
      rounds: measurements of each limit, in turn.
      steps: per measurement.
    """

    train: TrainConfig
    limits: tuple[int, ...] = option(
        "1MiB,5MiB,25MiB,100MiB",
        "Sizes at which a bucket closes, separated by commas; one bucket per gradient is "
        "measured besides.",
        parse=parse_sizes,
        entries="sizes",
    )
    first: int = option(
        "1MiB", "Size of the first bucket, where the limit is not below.", parse=parse_size
    )
    order: str = option("reverse", "In which gradients go into buckets.", choices=ORDERS)
    rounds: int = option(9, "Measurements of each limit, in turn.", least=1)
    steps: int = option(5, "Training steps per measurement.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.replicas * self.train.devices_per_replica < 2:
            raise ValueError("--replicas must be >= 2: one device has nothing to reduce")

    @property
    def candidates(self) -> tuple[int, ...]:
        """The limits to measure, 0 first."""
        return tuple(sorted({0, *self.limits}))

    def first_of(self, limit: int) -> int:
        """Size of the first bucket beside a limit."""
        return min(self.first, limit)
