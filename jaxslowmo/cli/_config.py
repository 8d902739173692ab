"""Configurations: one frozen dataclass per command, whose fields are also its options."""

import dataclasses
import typing
from typing import Any, get_type_hints

from jaxslowmo.topology import GRAPHS

from ._cluster_config import CheckpointConfig, ClusterConfig
from ._fields import Checked, option
from ._mixing import parse_mixing

ALGORITHMS = ("all_reduce", "local_sgd", "sgp", "slowmo", "slowmo_sgp", "diloco")
OPTIMIZERS = ("adamw", "sgd")
SCHEDULES = ("cosine", "constant")
EXECUTIONS = ("auto", "devices", "virtual")
MODES = ("traced", "host")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig(Checked):
    """What the replicas exchange, and when. Fields that `algorithm` does not use are ignored."""

    algorithm: str = option(
        "slowmo",
        "What replicas exchange: gradients every step (all_reduce), parameters with a few peers "
        "every step (sgp) or with all now and then; slowmo goes over local_sgd, slowmo_sgp over "
        "sgp.",
        panel="Algorithm",
        choices=ALGORITHMS,
    )
    bucket_mib: float = option(
        25, "Size of all_reduce's gradient buckets in MiB, the first one at most 1; see jaxslowmo "
        "tune buckets.", panel="Algorithm", least=0, below=2**20,
    )  # fmt: skip
    sync_every: int = option(
        12, "Steps between averages, of local_sgd and under slowmo.", panel="Algorithm", least=1
    )
    slow_every: int = option(
        48, "Steps between slow (outer) steps of slowmo and diloco.", panel="Algorithm", least=1
    )
    graph: str = option(
        "npeer_directed_exponential",
        "Who sends to whom in sgp; see jaxslowmo inspect graph.",
        panel="Algorithm",
        choices=tuple(GRAPHS),
    )
    peers_per_step: int | None = option(
        None, "Peers that a replica sends to in a step of sgp (default: the graph's).",
        panel="Algorithm", least=1,
    )  # fmt: skip
    overlap: int = option(
        0,
        "sgp: 0 sends the new parameters; 1 those of before the step, beside the computation of "
        "the gradients (with --mode host, or a graph that does not rotate); k mixes in what was "
        "sent k - 1 steps earlier.",
        panel="Algorithm",
        least=0,
    )
    mixing: str = option(
        "uniform",
        "What a replica of sgp keeps: as much as each peer gets (uniform), or self_weighted:SHARE.",
        panel="Algorithm",
    )
    slow_momentum: float = option(
        0.5, "Momentum of slowmo's slow step.", panel="Algorithm", least=0, below=1
    )
    slow_learning_rate: float = option(
        1.0, "Step size of slowmo's slow step.", panel="Algorithm", least=0
    )
    nesterov: bool = option(False, "Nesterov form of slowmo's slow step.", panel="Algorithm")
    shard_state: bool = option(
        True, "Spread slow state over the replicas (slowmo, diloco).", panel="Algorithm"
    )
    exact_average: bool = option(
        True,
        "Average in slowmo's slow step; without, it takes what its base left (and implies "
        "--no-shard-state).",
        panel="Algorithm",
    )
    outer_learning_rate: float = option(
        0.7, "Learning rate of diloco's outer optimizer (SGD).", panel="Algorithm", least=0
    )
    outer_momentum: float = option(
        0.9, "Nesterov momentum of diloco's outer optimizer.", panel="Algorithm", least=0, below=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_mixing(self.mixing)  # only for its checks


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Checked):
    """The optimizer inside each replica and the schedule that it shares with slowmo."""

    optimizer: str = option(
        "adamw", "Optimizer inside each replica.", panel="Optimizer", choices=OPTIMIZERS
    )
    learning_rate: float = option(1e-3, "Peak learning rate.", panel="Optimizer", least=0)
    warmup: int = option(30, "Steps of linear warm-up from 0.", panel="Optimizer", least=0)
    schedule: str = option(
        "cosine",
        "After the warm-up: down to a tenth of the peak at the last step (cosine), or the peak.",
        panel="Optimizer",
        choices=SCHEDULES,
    )
    weight_decay: float = option(0.1, "AdamW's weight decay.", panel="Optimizer", least=0)
    clip: float = option(
        1.0, "Largest norm of a gradient, as the optimizer gets it; 0: any.", panel="Optimizer",
        least=0,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TrainConfig(Checked):
    """One training run."""

    preset: str = option("1m", "Size of the model, and defaults that suit it.", panel="Model")
    dtype: str = option(
        "float32",
        "Dtype of activations and products; parameters are float32.",
        panel="Model",
        choices=DTYPES,
    )
    steps: int = option(300, "Optimizer steps.", panel="Training", least=1)
    batch: int = option(8, "Windows per replica and step.", panel="Training", least=1)
    accumulate: int = option(1, "Microbatches per step.", panel="Training", least=1)
    seed: int = option(0, "Of the parameters and the batches.", panel="Training", least=0)
    data: str | None = option(
        None,
        "A text file or a folder of them (default: the standard library's source).",
        panel="Training",
    )
    eval_every: int = option(
        50, "Steps between evaluations of the consensus model.", panel="Training", least=1
    )
    eval_batches: int = option(
        8, "Batches (about 8 kB each) of an evaluation.", panel="Training", least=1
    )
    log_every: int = option(10, "Steps between lines of metrics.", panel="Training", least=1)
    statistics: bool = option(
        False,
        "Measure what steps spend their time on: a table, and statistics.json beside the metrics.",
        panel="Training",
    )
    statistics_rate: int = option(
        100, "Of --statistics: after the first ten, measure every so many steps.",
        panel="Training", least=1,
    )  # fmt: skip
    replicas: int = option(4, "Data-parallel replicas.", panel="Devices", least=1)
    devices_per_replica: int = option(
        1, "Devices that share a replica's batch (two levels).", panel="Devices", least=1
    )
    execution: str = option(
        "auto",
        "A device per replica, virtual replicas on one device, or whichever the machine allows.",
        panel="Devices",
        choices=EXECUTIONS,
    )
    mode: str = option(
        "traced",
        "One program for all steps, or one per kind of step chosen on the host.",
        panel="Devices",
        choices=MODES,
    )
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = self.accumulate * self.devices_per_replica
        if self.batch % parts:
            raise ValueError(
                "--batch must be a multiple of --accumulate times --devices-per-replica = "
                f"{parts}, got {self.batch}"
            )
        if self.optimizer.warmup >= self.steps:
            raise ValueError(
                f"--warmup must be < --steps, got {self.optimizer.warmup} and {self.steps}"
            )


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """Several algorithms, each trained with every seed; all else is equal.

    An algorithm may bring settings of its own: "sgp+overlap=1+graph=ring".
    """

    train: TrainConfig
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, values in (("--algorithms", self.algorithms), ("--seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                given = ",".join(str(value) for value in values) or "nothing"
                raise ValueError(f"{name} must list one or more different values, got {given}")
        unknown = [name for name in self.base_algorithms if name not in ALGORITHMS]
        if unknown:
            raise ValueError(
                f"--algorithms must be of {', '.join(ALGORITHMS)}, got {', '.join(unknown)}"
            )
        if min(self.seeds) < 0:
            raise ValueError(f"--seeds must be >= 0, got {min(self.seeds)}")
        for algorithm in self.algorithms:
            self.run(algorithm, self.seeds[0])  # its settings are checked, too

    @property
    def base_algorithms(self) -> tuple[str, ...]:
        """The algorithms without their settings."""
        return tuple(algorithm.partition("+")[0] for algorithm in self.algorithms)

    def run(self, algorithm: str, seed: int) -> TrainConfig:
        """The configuration of one of the runs."""
        name, *settings = algorithm.split("+")
        changes = dict(_setting(text) for text in settings)
        return dataclasses.replace(
            self.train,
            seed=seed,
            algorithm=dataclasses.replace(self.train.algorithm, algorithm=name, **changes),
        )


def _setting(text: str) -> tuple[str, Any]:
    """Name and value of "overlap=1"."""
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    hints = get_type_hints(AlgorithmConfig)
    if not equals or name == "algorithm" or name not in hints:
        known = ", ".join(key for key in hints if key != "algorithm")
        raise ValueError(
            f"--algorithms: settings are written name+SETTING=VALUE with {known}, got {text!r}"
        )
    return name, _parse(name, hints[name], value)


def _parse(name: str, kind: Any, text: str) -> Any:
    kinds = set(typing.get_args(kind)) - {type(None)} or {kind}
    (kind,) = kinds
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise ValueError(
            f"--algorithms: {name} must be of type {kind.__name__}, got {text!r}"
        ) from None


# What differs from the defaults above, by preset of the model.
PRESET_DEFAULTS: dict[str, dict[str, Any]] = {
    "tiny": {"steps": 48, "batch": 4, "learning_rate": 1e-2, "eval_every": 24, "eval_batches": 1},
    "demo": {
        "steps": 192, "batch": 4, "learning_rate": 2e-3, "warmup": 16, "eval_every": 24,
        # Few replicas take little slow momentum.
        "eval_batches": 2, "slow_momentum": 0.2,
    },
    "1m": {},
    "10m": {
        "steps": 2000, "batch": 16, "learning_rate": 1e-3, "warmup": 100, "eval_every": 200,
        "eval_batches": 16,
    },
    "124m": {
        "steps": 20000, "batch": 16, "learning_rate": 6e-4, "warmup": 500, "eval_every": 500,
        "eval_batches": 32,
    },
}  # fmt: skip


PARTS: dict[str, type[Checked]] = {
    "algorithm": AlgorithmConfig,
    "optimizer": OptimizerConfig,
    "checkpoint": CheckpointConfig,
    "cluster": ClusterConfig,
}


def flat_fields() -> dict[str, tuple[type, dataclasses.Field[Any]]]:
    """Type and field of every option of a `TrainConfig`, those of its parts included."""
    found = {}
    for cls in (TrainConfig, *PARTS.values()):
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.metadata:
                found[field.name] = (hints[field.name], field)
    return found


def train_config(given: dict[str, Any]) -> TrainConfig:
    """The configuration with the values of `given`, then its preset's, then the defaults.

    Args:
        given: values by field name, of `TrainConfig` and its parts; None stands for not given.

    Raises:
        ValueError: a value against its rule, or an unknown preset.
    """
    given = {name: value for name, value in given.items() if value is not None}
    preset = given.get("preset", TrainConfig.preset)
    if preset not in PRESET_DEFAULTS:
        raise ValueError(f"--preset must be one of {', '.join(PRESET_DEFAULTS)}, got {preset}")
    values = {**PRESET_DEFAULTS[preset], **given}
    if "warmup" not in given and "steps" in given and given["steps"] >= 1:
        # A preset's warm-up suits its own number of steps.
        default = values.get("warmup", OptimizerConfig.warmup)
        values["warmup"] = min(default, given["steps"] // 10)

    def of(cls: type) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(cls) if field.metadata}
        return {name: value for name, value in values.items() if name in names}

    parts: dict[str, Any] = {name: cls(**of(cls)) for name, cls in PARTS.items()}
    return TrainConfig(**of(TrainConfig), **parts)
