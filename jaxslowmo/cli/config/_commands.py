"""Configurations of `jaxslowmo compare`, `sample` and `tune`."""

import dataclasses
import typing
from typing import Any

from ._algorithms import ALGORITHMS, OUTER_ALGORITHMS, AlgorithmConfig
from ._fields import (
    Checked,
    option,
    options_of,
    parse_integers,
    parse_names,
    parse_numbers,
    parse_size,
    parse_sizes,
)
from ._options import check_setting
from ._training import MOST_SEEDS, OptimizerConfig, TrainConfig, with_values

_SYMBOLS = 256  # the models read and write bytes


@dataclasses.dataclass(frozen=True)
class CompareConfig(Checked):
    """Several algorithms, each trained with every seed; all other options are equal.

    An algorithm may have its own settings, and its own rate: "sgp+overlap=1+learning-rate=0.002".
    """

    train: TrainConfig
    algorithms: tuple[str, ...] = option(
        "all_reduce,local_sgd,slowmo",
        "Algorithms, separated by commas; the ratios are to the first. Each may have settings, and "
        "its own rate: sgp+overlap=1+learning-rate=0.002.",
        parse=parse_names,
    )
    seeds: tuple[int, ...] = option(
        "0", "Seeds, separated by commas.", parse=parse_integers, least=0, below=MOST_SEEDS
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
                self.run(algorithm, self.seeds[0])  # raises if a setting is wrong
            except ValueError as error:
                raise ValueError(f"--algorithms {algorithm}: {error}") from None

    @property
    def base_algorithms(self) -> tuple[str, ...]:
        """The names of the algorithms, without settings."""
        return tuple(algorithm.partition("+")[0] for algorithm in self.algorithms)

    def run(self, algorithm: str, seed: int) -> TrainConfig:
        """Return the configuration of the run of one algorithm with one seed."""
        name, *settings = algorithm.split("+")
        changes = dict(_setting(text) for text in settings)
        for setting, value in changes.items():
            check_setting(name, setting, value)
        return with_values(self.train, {"seed": seed, "algorithm": name, **changes})


# Algorithms do best at different rates: rare exchanges at smaller ones.
_OF_THE_OPTIMIZER = {"learning_rate": options_of(OptimizerConfig)["learning_rate"]}


def _setting(text: str) -> tuple[str, Any]:
    """Return name and value of a setting such as "overlap=1"."""
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    settings = {**options_of(AlgorithmConfig), **_OF_THE_OPTIMIZER}
    if not equals or name == "algorithm" or name not in settings:
        names = ", ".join(key for key in settings if key != "algorithm")
        raise ValueError(f"settings are written name+SETTING=VALUE with {names}, got {text!r}")
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
    """The model and the settings with which `jaxslowmo sample` writes text."""

    step: int | None = option(
        None, "Step of the checkpoint to take the model from (default: the newest).", least=0
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
    seed: int = option(
        0, "Seed of the drawing: the same seed gives the same text.", least=0, below=MOST_SEEDS
    )


ORDERS = ("ready", "reverse", "forward")


@dataclasses.dataclass(frozen=True)
class TuneBucketsConfig(Checked):
    """The bucket limits that `jaxslowmo tune buckets` measures.

    Attributes:
      train: options for model, batch, optimizer and devices.
      limits: sizes in bytes at which a bucket closes; 0 (one bucket per gradient) is always added.
      first: size of the first bucket in bytes, unless the limit is smaller.
      order: one of `ORDERS`: the order in which gradients fill the buckets.
      rounds: number of measurements of each limit; the limits take turns.
      steps: number of training steps per measurement.
    """

    train: TrainConfig
    limits: tuple[int, ...] = option(
        "1MiB,5MiB,25MiB,100MiB",
        "Sizes at which a bucket closes, separated by commas; one bucket per gradient is "
        "always measured, too.",
        parse=parse_sizes,
        entries="sizes",
    )
    first: int = option(
        "1MiB", "Size of the first bucket, where the limit is not below.", parse=parse_size
    )
    order: str = option("ready", "Order in which gradients go into buckets.", choices=ORDERS)
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
        """Return the size of the first bucket in bytes under a bucket limit in bytes."""
        return min(self.first, limit)


@dataclasses.dataclass(frozen=True)
class TuneOuterConfig(Checked):
    """The settings of slow (outer) steps that `jaxslowmo tune outer` tries."""

    train: TrainConfig
    momenta: tuple[float, ...] = option(
        "0.2,0.4,0.6,0.8",
        "Slow momenta, of diloco those of its outer optimizer, separated by commas.",
        parse=parse_numbers,
        least=0,
        below=1,
    )
    rates: tuple[float, ...] = option(
        "1",
        "Slow learning rates, or those of diloco's outer optimizer.",
        parse=parse_numbers,
        least=0,
    )
    factors: tuple[float, ...] = option(
        "1",
        "Multiples of --learning-rate; a slow momentum often does best at a smaller rate.",
        parse=parse_numbers,
        least=0,
    )
    periods: tuple[int, ...] = option(
        "48", "Steps between slow steps, separated by commas.", parse=parse_integers, least=1
    )
    seeds: tuple[int, ...] = option(
        "0,1,2", "Seeds of each setting.", parse=parse_integers, least=0, below=MOST_SEEDS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.algorithm.algorithm not in OUTER_ALGORITHMS:
            raise ValueError(
                f"--algorithm must be one of {', '.join(OUTER_ALGORITHMS)}, which have slow steps; "
                f"got {self.train.algorithm.algorithm}"
            )
        if self.train.replicas < 2:
            raise ValueError("--replicas must be >= 2: one replica has nothing to average")
        if 0 in self.factors or not self.train.optimizer.learning_rate:
            raise ValueError("--factors and --learning-rate must be > 0, got 0")
        if longest := [period for period in self.periods if period > self.train.steps]:
            raise ValueError(
                f"--periods must be <= --steps, {self.train.steps}, or no slow step is made; "
                f"got {longest[0]}"
            )

    def settings(self) -> dict[str, list[float]]:
        """Return the settings by name, a number for each: all combinations, plain averages first.

        A plain average is a slow step without momentum, at a rate of 1.
        """
        pairs = [
            (1.0, 0.0),
            *((r, m) for r in self.rates for m in self.momenta if (r, m) != (1, 0)),
        ]
        rows = [(factor, *pair) for factor in self.factors for pair in pairs]
        columns = zip(*rows, strict=True)
        return dict(zip(("factor", "rate", "momentum"), map(list, columns), strict=True))
