"""Configuration of `jaxslowmo train`: its parts, and the defaults of each preset."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_type_hints

from ._algorithms import AlgorithmConfig
from ._checkpoint import CheckpointConfig
from ._cluster import ClusterConfig
from ._fields import Checked, Rule, option, options_of
from ._mesh import MeshConfig, check_mesh, parse_mesh

OPTIMIZERS = ("adamw", "sgd")
SCHEDULES = ("cosine", "constant")
EXECUTIONS = ("auto", "devices", "virtual")
MODES = ("traced", "host")
DTYPES = ("float32", "bfloat16", "float16")
MOST_LOSS_SCALE = 2**24  # where it stops growing, too
# jax takes 32 bits of a seed: of two that differ above them it makes the same keys.
MOST_SEEDS = 2**32


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
        "After the warm-up: down to a tenth of the peak at the schedule's last step (cosine), or "
        "the peak.",
        panel="Optimizer",
        choices=SCHEDULES,
        flag="--rate-schedule",
    )
    schedule_steps: int | None = option(
        None,
        "Steps that --rate-schedule spans (default: --steps; of a resumed run: what it was).",
        panel="Optimizer",
        least=1,
        goes_with=("schedule", ("cosine",)),
    )
    weight_decay: float = option(
        0.1,
        "AdamW's weight decay.",
        panel="Optimizer",
        least=0,
        goes_with=("optimizer", ("adamw",)),
    )
    clip: float = option(
        1.0,
        "Largest norm of a gradient of the whole model, as the optimizer gets it; 0: any.",
        panel="Optimizer",
        least=0,
    )
    validate: str = option(
        "before",
        "When gradients are clipped, and looked at for overflow: before the optimizer's update, or "
        "after it, so that the norm is found beside it; the results are the same.",
        panel="Optimizer",
        choices=("before", "after"),
    )


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
    tied: bool = option(False, "The embedding's table is the output layer, too.", panel="Model")
    loss_scale: float = option(
        2.0**16,
        "First scale of the loss, which then follows overflows; 0: none.",
        panel="Model", least=0, goes_with=("dtype", ("float16",)),
    )  # fmt: skip
    loss_scale_interval: int = option(
        2000,
        "Updates without overflow after which the scale of the loss doubles.",
        panel="Model", least=1, goes_with=("dtype", ("float16",)),
    )  # fmt: skip
    steps: int = option(300, "Optimizer steps.", panel="Training", least=1)
    batch: int = option(8, "Windows per replica and step.", panel="Training", least=1, below=2**20)
    accumulate: int = option(1, "Microbatches per step.", panel="Training", least=1)
    prefetch: int = option(
        2,
        "Batches that are loaded, and put on the devices, ahead of their steps; 0: none.",
        panel="Training",
        least=0,
        below=2**20,
    )
    seed: int = option(
        0, "Of the parameters and the batches.", panel="Training", least=0, below=MOST_SEEDS
    )
    data: str | None = option(
        None,
        "A text file or a folder of them (default: the standard library's source).",
        panel="Training",
    )
    overwrite: bool = option(
        False, "First delete what an earlier run or comparison left in --out.", panel="Training"
    )
    eval_every: int = option(
        50, "Steps between evaluations of the consensus model.", panel="Training", least=1
    )
    eval_batches: int = option(
        8,
        "Batches (about 8 kB each) of an evaluation.",
        panel="Training",
        least=1,
        below=2**20,
    )
    patience: int = option(
        0,
        "Evaluations in a row without a smaller validation loss after which the run ends; 0: none.",
        panel="Training",
        least=0,
    )
    log_every: int = option(10, "Steps between lines of metrics.", panel="Training", least=1)
    tensorboard: bool = option(
        False, "Write the metrics to OUT/tensorboard, too, for TensorBoard.", panel="Training"
    )
    statistics: bool = option(
        False,
        "Measure what steps spend their time on: a table, and statistics.json beside the metrics.",
        panel="Training",
    )
    statistics_rate: int = option(
        100, "Of --statistics: after the first ten, measure every so many steps.",
        panel="Training", least=1, goes_with=("statistics", (True,)),
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
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    # Of `KEPT`, what nobody gave: no option, since it follows from those that were given.
    not_given: tuple[str, ...] = ()

    def flat(self) -> dict[str, Any]:
        """All values by the names of their options."""
        parts = [vars(self), *(vars(getattr(self, part)) for part in PARTS)]
        values = {name: value for part in parts for name, value in part.items()}
        return {name: values[name] for name in train_options()}

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes of its mesh, by name."""
        inner = {"device": self.devices_per_replica} if self.devices_per_replica > 1 else {}
        return {"replica": self.replicas, **inner, **self.mesh.model_axes}

    @property
    def devices_of_a_replica(self) -> int:
        """Over all axes inside of it."""
        return math.prod(self.axes.values()) // self.replicas

    @property
    def rows(self) -> int:
        """Windows that one pass of the model computes on the devices that share a part of them."""
        shares = self.devices_per_replica * self.mesh.sizes.get("fsdp", 1)
        return self.batch // (self.accumulate * shares)

    @property
    def num_microbatches(self) -> int:
        """Parts of a batch that go through the stages one after the other; 1 without stages."""
        return self.mesh.num_microbatches(self.rows)

    @property
    def schedule_length(self) -> int:
        """Steps that the schedule of the learning rate spans."""
        return self.optimizer.schedule_steps or self.steps

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = self.accumulate * self.devices_per_replica
        if self.batch % parts:
            raise ValueError(
                "--batch must be a multiple of --accumulate times --devices-per-replica = "
                f"{parts}, got {self.batch}"
            )
        each = self.batch // self.accumulate
        check_mesh(self.mesh, self.replicas, self.devices_per_replica, each)
        if self.optimizer.warmup >= self.schedule_length:
            name = "--schedule-steps" if self.optimizer.schedule_steps else "--steps"
            raise ValueError(
                f"--warmup must be < {name}, got {self.optimizer.warmup} and {self.schedule_length}"
            )
        if self.loss_scale and not 1 <= self.loss_scale <= MOST_LOSS_SCALE:
            raise ValueError(
                f"--loss-scale must be 0, or from 1 to {MOST_LOSS_SCALE}, got {self.loss_scale}"
            )
        if self.overwrite and self.checkpoint.resume:
            raise ValueError(
                "--overwrite deletes what --resume would go on from: give one of them, not both"
            )


# A resumed run keeps these as they were, where nobody says otherwise.
KEPT = ("steps", "warmup", "schedule_steps")

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
    "7b": {
        "steps": 100000, "batch": 8, "learning_rate": 3e-4, "warmup": 2000, "eval_every": 1000,
        "eval_batches": 32, "dtype": "bfloat16",
    },
}  # fmt: skip


PARTS: dict[str, type[Checked]] = {
    "mesh": MeshConfig,
    "algorithm": AlgorithmConfig,
    "optimizer": OptimizerConfig,
    "checkpoint": CheckpointConfig,
    "cluster": ClusterConfig,
}


def train_options() -> dict[str, tuple[type, dataclasses.Field[Any], Rule]]:
    """Type, field and rule of every option of a `TrainConfig`, those of its parts included."""
    found = {}
    for cls in (TrainConfig, *PARTS.values()):
        hints = get_type_hints(cls)
        found |= {name: (hints[name], *known) for name, known in options_of(cls).items()}
    return found


def train_config(given: Mapping[str, Any]) -> TrainConfig:
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
    length = given.get("schedule_steps", given.get("steps", 0))
    if "warmup" not in given and length >= 1:
        # A preset's warm-up suits its own number of steps.
        default = values.get("warmup", OptimizerConfig.warmup)
        values["warmup"] = min(default, length // 10)

    if given.get("pipeline") in SCHEDULES:
        raise ValueError(
            f"--schedule is that of a pipeline, and --rate-schedule that of the learning rate; got "
            f"--schedule {given['pipeline']}"
        )
    if "mesh" in given:
        # It says how many there are: what presets say of that counts no more.
        sizes = parse_mesh(given["mesh"])
        values = {
            **values,
            "replicas": given.get("replicas", sizes.get("replica", 1)),
            "devices_per_replica": given.get("devices_per_replica", sizes.get("device", 1)),
        }

    def of(cls: type) -> dict[str, Any]:
        return {name: values[name] for name in options_of(cls) if name in values}

    parts: dict[str, Any] = {name: cls(**of(cls)) for name, cls in PARTS.items()}
    not_given = tuple(name for name in KEPT if name not in given)
    return TrainConfig(**of(TrainConfig), **parts, not_given=not_given)


def with_values(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """A configuration with other values of some options, of whichever part they are.

    Raises:
      ValueError: a value against its rule.
    """

    def of(cls: type) -> dict[str, Any]:
        return {name: changes[name] for name in options_of(cls) if name in changes}

    parts: dict[str, Any] = {
        name: dataclasses.replace(getattr(config, name), **of(cls)) for name, cls in PARTS.items()
    }
    return dataclasses.replace(config, **of(TrainConfig), **parts)
