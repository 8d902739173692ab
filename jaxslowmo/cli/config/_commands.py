"""The configurations of all commands, by name; `_inspect` and `_training` hold parts of them."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from ._cluster import ClusterOptions
from ._inspect import InspectGraphConfig, InspectGraphsConfig, InspectScheduleConfig
from ._options import (
    Called,
    Count,
    Natural,
    NotNegative,
    OneOf,
    Option,
    Options,
    Range,
    Seed,
    Share,
    Size,
    options_of,
)
from ._training import (
    ALGORITHMS,
    OUTER_ALGORITHMS,
    AlgorithmOptions,
    CheckpointOptions,
    IslandOptions,
    OptimizerOptions,
    TrainConfig,
    refuse_unused,
    train_config,
    train_options,
)


@dataclasses.dataclass(frozen=True)
class OfRuns(Options):
    """Base of the commands that have options of `train`."""

    SHARED: ClassVar[str] = " ".join(train_options())  # options of training that it has
    FIXED: ClassVar[Mapping[str, Any]] = {}  # those that it sets itself

    train: TrainConfig
    config: Path | None = None
    """YAML or JSON file with values of options by name, such as config.json of a run. They replace
    those of a preset, and options of the command line replace both."""

    @classmethod
    def shared(cls) -> dict[str, Option]:
        """Return the options of training that the command has, by the names of their fields."""
        return {name: train_options()[name] for name in cls.SHARED.split()}

    @classmethod
    def made_of(cls, given: Mapping[str, Any], file: Mapping[str, Any]) -> Self:
        """Return the configuration; raise `ValueError`, too, for an option without effect."""
        shared = cls.shared()
        typed = {name: value for name, value in given.items() if name in shared}
        read = {name: value for name, value in file.items() if name in shared}
        names = options_of(cls)
        # --steps of `tune buckets` is not what a file for `train` means by steps.
        file = {name: value for name, value in file.items() if name not in train_options()}
        own = {name: x for name, x in {**file, **given}.items() if name in names}
        command = cls(train_config({**typed, **cls.FIXED}, read), **own)
        refuse_unused(typed, command.train, command.base_algorithms)
        for name, what in (("resume", "go on with"), ("overwrite", "delete")):
            if "out" in names and "out" not in own and typed.get(name):
                raise ValueError(f"--{name} needs --out, the folder of the run to {what}")
        return command

    @property
    def base_algorithms(self) -> tuple[str, ...]:
        """The names of the algorithms that are trained."""
        return (self.train.algorithm,)


@dataclasses.dataclass(frozen=True)
class InRunFolder(OfRuns):
    """Base of those that also write results."""

    out: Path | None = None
    """Folder for the results (default: a new one in runs, named by the command and the date)."""


@dataclasses.dataclass(frozen=True)
class TrainCommand(InRunFolder):
    """Train a byte-level language model with one algorithm."""


@dataclasses.dataclass(frozen=True)
class InspectConfigConfig(OfRuns):
    """Show devices and memory of a run of `train` with these options, and what it would send."""


@dataclasses.dataclass(frozen=True)
class LaunchConfig(Options):
    """Train in several processes of this machine: launch --processes 4 -- train --out ..."""

    processes: Annotated[int, Range(1, 1025)]
    """Processes to start on this machine."""
    restarts: Natural = 0
    """Start all processes again up to so many times without a newer checkpoint, when one failed."""
    heartbeat_timeout: Annotated[int, Range(2)] = ClusterOptions.heartbeat_timeout
    """Treat a process as lost after this many seconds of silence. Pauses of up to half of it are
    always tolerated."""


# Options about a single run, or that a comparison sets itself.
_OF_ONE_RUN = {
    *("algorithm", "seed", "patience", "statistics", "statistics_rate"),
    *(*options_of(CheckpointOptions), *options_of(ClusterOptions), *options_of(IslandOptions)),
}
# Algorithms do best at different rates: rare exchanges at smaller ones.
_SETTINGS = options_of(AlgorithmOptions) | {
    "learning_rate": options_of(OptimizerOptions)["learning_rate"]
}


@dataclasses.dataclass(frozen=True)
class CompareConfig(InRunFolder):
    """Train with several algorithms at equal steps and seeds: a table and a figure."""

    SHARED = " ".join(name for name in train_options() if name not in _OF_ONE_RUN)

    algorithms: tuple[str, ...] = ("all_reduce", "local_sgd", "slowmo")
    """Algorithms, separated by commas; ratios are relative to the first. Each may have settings of
    its own: sgp+overlap=1+learning-rate=0.002."""
    seeds: tuple[Seed, ...] = (0,)
    """Seeds, separated by commas."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.base_algorithms:
            OneOf(*ALGORITHMS)("--algorithms", name)
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
        config = dataclasses.replace(self.train, **{"seed": seed, "algorithm": name, **changes})
        refuse_unused(changes, config)
        return config


def _setting(text: str) -> tuple[str, Any]:
    """Return name and value of a setting such as "overlap=1"."""
    key, equals, value = text.partition("=")
    name = key.replace("-", "_")
    if not equals or name == "algorithm" or name not in _SETTINGS:
        names = ", ".join(key for key in _SETTINGS if key != "algorithm")
        raise ValueError(f"settings are written name+SETTING=VALUE with {names}, got {text!r}")
    return name, _SETTINGS[name].read(value)


@dataclasses.dataclass(frozen=True)
class SampleConfig(Options):
    """Write text from the trained model of a run."""

    run: Annotated[Path, Called("RUN")]
    """Folder of a run with checkpoints, or of an exported model."""
    step: Natural | None = None
    """Step of the checkpoint to take the model from (default: the newest)."""
    prompt: str = "\n"
    """Text to continue, of which the model sees the end (default: a new line)."""
    tokens: Annotated[int, Range(1, 2**20)] = 200
    """Bytes to write."""
    temperature: NotNegative = 0.8
    """1 samples from the model's distribution, less prefers likely bytes, 0 takes the likeliest."""
    top_k: Annotated[int, Range(0, 257)] = 0  # the models read and write bytes
    """Sample from this many of the likeliest bytes; 0: from all."""
    seed: Seed = 0
    """Seed of the sampling: the same seed gives the same text."""


@dataclasses.dataclass(frozen=True)
class IslandsStatusConfig(Options):
    """Show who takes part in a run of islands: rounds, bytes, and when they last wrote."""

    url: Annotated[str, Called("URL")]
    """Run of islands, as in train --islands."""


@dataclasses.dataclass(frozen=True)
class TuneBucketsConfig(InRunFolder):
    """Measure bucket limits of the gradient reduction, and print the best.

    It times whole training steps of data parallelism: loss, gradients, reduction, optimizer.
    """

    FIXED = {"algorithm": "all_reduce", "execution": "devices"}  # noqa: RUF012 - of the class
    SHARED = "preset dtype attention batch accumulate seed replicas devices_per_replica optimizer"

    limits: tuple[Size, ...] = (2**20, 5 * 2**20, 25 * 2**20, 100 * 2**20)
    """Bucket sizes to measure, separated by commas; one bucket per gradient is always measured, too
    (default: 1MiB,5MiB,25MiB,100MiB)."""
    first: Size = 2**20
    """Size of the first bucket, if the limit is not smaller (default: 1MiB)."""
    order: Annotated[str, OneOf("ready", "reverse", "forward")] = "ready"
    """Order in which gradients are put into buckets."""
    rounds: Count = 9
    """Number of measurements of each limit."""
    steps: Count = 5
    """Training steps per measurement."""

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
class TuneOuterConfig(InRunFolder):
    """Try momenta and rates of slow steps with several seeds, and print the best.

    All seeds of a setting train in one program, with virtual replicas on one device.
    """

    FIXED = {"execution": "virtual"}  # noqa: RUF012 - of the class
    SHARED = (
        "preset tied steps batch data eval_every eval_batches replicas algorithm sync_every graph "
        "peers_per_step overlap mixing nesterov fragments delay merge inner_state optimizer "
        "learning_rate warmup schedule weight_decay clip"
    )

    momenta: tuple[Share, ...] = (0.2, 0.4, 0.6, 0.8)
    """Slow momenta, of diloco those of its outer optimizer, separated by commas."""
    rates: tuple[NotNegative, ...] = (1.0,)
    """Slow learning rates, or those of diloco's outer optimizer."""
    factors: tuple[NotNegative, ...] = (1.0,)
    """Multiples of --learning-rate to try; slow momentum often works best with a smaller rate."""
    periods: tuple[Count, ...] = (48,)
    """Steps between slow steps, separated by commas."""
    seeds: tuple[Seed, ...] = (0, 1, 2)
    """Seeds of each setting."""

    def __post_init__(self) -> None:
        super().__post_init__()
        OneOf(*OUTER_ALGORITHMS)("--algorithm", self.train.algorithm)
        if self.train.replicas < 2:
            raise ValueError("--replicas must be >= 2: one replica has nothing to average")
        if 0 in self.factors or not self.train.learning_rate:
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
        pairs = dict.fromkeys([(1.0, 0.0), *itertools.product(self.rates, self.momenta)])
        rows = itertools.product(self.factors, pairs)
        columns = zip(*((factor, *pair) for factor, pair in rows), strict=True)
        return dict(zip(("factor", "rate", "momentum"), map(list, columns), strict=True))


CONFIGS: dict[str, type[Options]] = {
    "train": TrainCommand,
    "compare": CompareConfig,
    "launch": LaunchConfig,
    "sample": SampleConfig,
    "islands status": IslandsStatusConfig,
    "inspect graph": InspectGraphConfig,
    "inspect graphs": InspectGraphsConfig,
    "inspect config": InspectConfigConfig,
    "inspect schedule": InspectScheduleConfig,
    "tune buckets": TuneBucketsConfig,
    "tune outer": TuneOuterConfig,
}
