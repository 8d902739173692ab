"""The configuration of `jaxslowmo train`, its parts, and the defaults of each preset."""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from .._errors import as_flag
from ._algorithms import AlgorithmConfig
from ._cluster import ClusterConfig
from ._mesh import RATE_SCHEDULES, MeshConfig
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
    options_of,
)

MOST_LOSS_SCALE = 2**24  # the loss scale stops growing there
_UNDER_A_MILLION = Range(1, 2**20)
# Options that --mesh replaces, and its axes.
_OF_MESH = {"replicas": "replica", "devices_per_replica": "device"}


# Values that differ from the defaults below, by preset of the model.
PRESET_DEFAULTS: dict[str, dict[str, Any]] = {
    "tiny": {"steps": 48, "batch": 4, "learning_rate": 1e-2, "eval_every": 24, "eval_batches": 1},
    "demo": {
        "steps": 192, "batch": 4, "learning_rate": 2e-3, "warmup": 16, "eval_every": 24,
        # Few replicas need a smaller slow momentum.
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


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Options):
    """The checkpoints of a run, and what it does when its loss is not finite."""

    HEADING = "Checkpoint"

    checkpoint_every: Natural = 0
    """Steps between checkpoints in OUT/checkpoints; 0: only when SIGTERM or Ctrl-C ends the run
    early."""
    keep: Count = 3
    """Checkpoints to keep, the newest."""
    resume: bool = False
    """Go on from the newest checkpoint in --out; from scratch where there is none."""
    fallback: bool = False
    """With --resume, also of a start that --restarts adds: where the newest checkpoint is damaged,
    take the one before."""
    max_failed_saves: Count = 3
    """Saves in a row that may fail, say on a full disk; after so many the run ends, as it does
    where the last one fails."""
    export: bool = False
    """Write the consensus model to OUT/model at the end."""
    check_parameters: bool = False
    """Before every exchange of parameters ask all replicas whether theirs are finite (4 bytes), and
    do not exchange where one's are not, but do as --on-nan says."""
    on_nan: Annotated[str, OneOf("stop", "rollback")] = "stop"
    """When the loss is not finite: stop, or go back to the last checkpoint and leave out the
    batches since then."""
    max_rollbacks: Count = 3
    """With --on-nan rollback: stop after this many rollbacks."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Options):
    """The optimizer of each replica, and the learning rate schedule that slowmo uses, too."""

    HEADING = "Optimizer"

    optimizer: Annotated[str, OneOf("adamw", "sgd")] = "adamw"
    """Optimizer inside each replica."""
    learning_rate: NotNegative = 1e-3
    """Peak learning rate."""
    warmup: Natural = 30
    """Steps of linear warm-up from 0."""
    schedule: Annotated[str, OneOf(*RATE_SCHEDULES), Called("--rate-schedule")] = "cosine"
    """After the warm-up: down to a tenth of the peak at the schedule's last step (cosine), or the
    peak."""
    schedule_steps: Count | None = None
    """Steps that --rate-schedule spans (default: --steps; of a resumed run: what it was)."""
    weight_decay: NotNegative = 0.1
    """AdamW's weight decay."""
    clip: NotNegative = 1.0
    """Largest norm of a gradient of the whole model, as the optimizer gets it; 0: any."""


def _check_loss_scale(flag: str, value: float) -> None:
    if value and not 1 <= value <= MOST_LOSS_SCALE:
        raise ValueError(f"{flag} must be 0, or from 1 to {MOST_LOSS_SCALE}, got {value}")


@dataclasses.dataclass(frozen=True)
class _ModelOptions(Options):
    HEADING = "Model"

    preset: Annotated[str, OneOf(*PRESET_DEFAULTS)] = "1m"
    """Size of the model, and defaults that suit it."""
    dtype: Annotated[str, OneOf("float32", "bfloat16", "float16")] = "float32"
    """Dtype of activations and products; parameters are float32."""
    attention: Annotated[str, OneOf("xla", "cudnn")] = "xla"
    """Attention by XLA, on any device, or by NVIDIA's cuDNN, on GPUs."""
    tied: bool = False
    """The embedding's table is the output layer, too."""
    loss_scale: Annotated[NotNegative, _check_loss_scale] = 2.0**16
    """First scale of the loss, which then follows overflows; 0: none."""
    loss_scale_interval: Count = 2000
    """Updates without overflow after which the scale of the loss doubles."""


@dataclasses.dataclass(frozen=True)
class _TrainingOptions(Options):
    HEADING = "Training"

    steps: Count = 300
    """Optimizer steps."""
    batch: Annotated[int, _UNDER_A_MILLION] = 8
    """Windows per replica and step."""
    accumulate: Count = 1
    """Microbatches per step."""
    prefetch: Annotated[int, Range(0, 2**20)] = 2
    """Batches that are loaded, and put on the devices, ahead of their steps; 0: none."""
    seed: Seed = 0
    """Seed of parameters and batches."""
    data: str | None = None
    """A text file or a folder of them (default: the standard library's source)."""
    overwrite: bool = False
    """First delete what an earlier run or comparison left in --out."""
    eval_every: Count = 50
    """Steps between evaluations of the consensus model."""
    eval_batches: Annotated[int, _UNDER_A_MILLION] = 8
    """Batches (about 8 kB each) of an evaluation."""
    patience: Natural = 0
    """Evaluations in a row without a smaller validation loss after which the run ends; 0: none."""
    log_every: Count = 10
    """Steps between lines of metrics."""
    tensorboard: bool = False
    """Write the metrics to OUT/tensorboard, too, for TensorBoard."""
    statistics: bool = False
    """Measure what steps spend their time on: a table, and statistics.json next to the metrics."""
    statistics_rate: Count = 100
    """With --statistics: measure every so many steps, after the first ten."""


@dataclasses.dataclass(frozen=True)
class _DeviceOptions(Options):
    HEADING = "Device"

    replicas: Count = 4
    """Data-parallel replicas."""
    devices_per_replica: Count = 1
    """Devices that share a replica's batch (two levels)."""
    execution: Annotated[str, OneOf("auto", "devices", "virtual")] = "auto"
    """A device per replica, virtual replicas on one device, or whichever the machine allows."""
    mode: Annotated[str, OneOf("traced", "host")] = "traced"
    """One program for all steps, or one per kind of step chosen on the host."""


@dataclasses.dataclass(frozen=True)
class TrainConfig(_DeviceOptions, _TrainingOptions, _ModelOptions):
    """The configuration of one training run."""

    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    # The names in `KEPT` that nobody gave.
    not_given: Annotated[tuple[str, ...], Called(None)] = ()

    def flat(self) -> dict[str, Any]:
        """Return the values of all options by field name."""
        parts = [vars(self), *(vars(getattr(self, part)) for part in PARTS)]
        values = {name: value for part in parts for name, value in part.items()}
        return {name: values[name] for name in train_options()}

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh axes, by name."""
        inner = {"device": self.devices_per_replica} if self.devices_per_replica > 1 else {}
        return {"replica": self.replicas, **inner, **self.model_axes}

    @property
    def model_axes(self) -> dict[str, int]:
        """The sizes of the axes that split the model, by name; {} without `--mesh`."""
        return self.mesh.model_axes

    @property
    def devices_of_a_replica(self) -> int:
        """The number of devices of one replica: the product of all axes but "replica"."""
        return math.prod(self.axes.values()) // self.replicas

    @property
    def rows(self) -> int:
        """The windows of one forward pass on each group of devices that splits a model."""
        shares = self.devices_per_replica * self.model_axes.get("fsdp", 1)
        return self.batch // (self.accumulate * shares)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches that go through the pipeline stages; 1 without stages."""
        return self.mesh.num_microbatches(self.rows) if "stage" in self.model_axes else 1

    @property
    def schedule_length(self) -> int:
        """The number of steps of the learning rate schedule."""
        return self.optimizer.schedule_steps or self.steps

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, axis in _OF_MESH.items():
            size, value = self.mesh.sizes.get(axis, 1), getattr(self, name)
            if self.mesh.mesh is not None and size != value:
                flag = as_flag(name)
                raise ValueError(
                    f"--mesh and {flag} contradict each other: {self.mesh.mesh} has {size} along "
                    f"{axis}, got {value}; leave {flag} out"
                )
        shares = self.accumulate * self.devices_per_replica * self.model_axes.get("fsdp", 1)
        if self.batch % shares:
            raise ValueError(
                "--batch must be a multiple of --accumulate times --devices-per-replica times the "
                f"size of fsdp in --mesh = {shares}, got {self.batch}"
            )
        _ = self.num_microbatches  # raises if --microbatches does not divide the batch
        if self.optimizer.warmup >= self.schedule_length:
            name = "--schedule-steps" if self.optimizer.schedule_steps else "--steps"
            raise ValueError(
                f"--warmup must be < {name}, got {self.optimizer.warmup} and {self.schedule_length}"
            )
        if self.overwrite and self.checkpoint.resume:
            raise ValueError(
                "--overwrite deletes what --resume would go on from: give one of them, not both"
            )


# A resumed run keeps its earlier values of these, unless the command line gives new ones.
KEPT = ("steps", "warmup", "schedule_steps")

PARTS: dict[str, Any] = {
    field.name: field.default_factory
    for field in dataclasses.fields(TrainConfig)
    if field.default_factory is not dataclasses.MISSING
}


@functools.cache
def train_options() -> dict[str, Option]:
    """Return all options of `TrainConfig` and its parts, by the names of their fields."""
    configs = (TrainConfig, *PARTS.values())
    return {name: option for config in configs for name, option in options_of(config).items()}


def train_config(options: Mapping[str, Any], file: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the configuration: values of `options`, else of a file, the preset, the defaults.

    Args:
      options: values by field name, of `TrainConfig` and its parts; None: not given.
      file: values of a configuration file, likewise.

    Raises:
      ValueError: a value breaks the rule of its option, or the preset is unknown.
    """
    options = {name: value for name, value in options.items() if value is not None}
    given = {**(file or {}), **options}
    preset = given.get("preset", TrainConfig.preset)
    train_options()["preset"].check(preset)
    values = {**PRESET_DEFAULTS[preset], **given}
    length = given.get("schedule_steps", given.get("steps", 0))
    if "warmup" not in given and length >= 1:
        # The warm-up of a preset suits the preset's own number of steps.
        default = values.get("warmup", OptimizerConfig.warmup)
        values["warmup"] = min(default, length // 10)
    if "mesh" in given:
        # --mesh gives these sizes, so those of a preset, or of a file, no longer count.
        sizes = MeshConfig(mesh=given["mesh"]).sizes
        values |= {name: sizes.get(axis, 1) for name, axis in _OF_MESH.items()}
        values |= options if "mesh" in options else given
    not_given = tuple(name for name in KEPT if name not in given)
    return with_values(TrainConfig(not_given=not_given), values)


def with_values(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """Return a copy of a configuration with new values of some options, also of its parts.

    Raises:
      ValueError: a value breaks the rule of its option.
    """

    def of(cls: type) -> dict[str, Any]:
        return {name: changes[name] for name in options_of(cls) if name in changes}

    parts: dict[str, Any] = {
        name: dataclasses.replace(getattr(config, name), **of(cls)) for name, cls in PARTS.items()
    }
    return dataclasses.replace(config, **of(TrainConfig), **parts)


# Options, and with which values of another one they have an effect.
GOES_WITH: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("bucket_mib", "algorithm", ("all_reduce",)),
    ("sync_every", "algorithm", ("local_sgd", "slowmo")),
    ("graph peers_per_step overlap mixing", "algorithm", ("sgp", "slowmo_sgp")),
    ("slow_momentum slow_learning_rate nesterov", "algorithm", ("slowmo", "slowmo_sgp")),
    ("exact_average", "algorithm", ("slowmo", "slowmo_sgp")),
    ("slow_every shard_state", "algorithm", ("slowmo", "slowmo_sgp", "diloco")),
    ("fragments delay merge", "algorithm", ("local_sgd", "slowmo", "slowmo_sgp", "diloco")),
    ("codec", "algorithm", ("local_sgd", "sgp", "slowmo", "slowmo_sgp", "diloco")),
    ("outer_learning_rate outer_momentum", "algorithm", ("diloco",)),
    ("weight_decay", "optimizer", ("adamw",)),
    ("schedule_steps", "schedule", ("cosine",)),
    ("attention", "dtype", ("bfloat16", "float16")),
    ("loss_scale loss_scale_interval", "dtype", ("float16",)),
    ("statistics_rate", "statistics", (True,)),
    ("max_rollbacks", "on_nan", ("rollback",)),
)


def refuse_unused(
    given: Mapping[str, Any], config: TrainConfig, algorithms: Collection[str] = ()
) -> None:
    """Raise `ValueError` if an option has no effect together with the others.

    Args:
      given: values of the command line by field name, of `TrainConfig` and its parts.
      config: the configuration made of them, with file, preset and defaults.
      algorithms: the algorithms that are trained; () is the one of `config`.

    Raises:
      ValueError: the message names the first such option, its value, and what it goes with.
    """
    flat, options = config.flat(), train_options()
    for names, other, values in GOES_WITH:
        actual = algorithms if other == "algorithm" and algorithms else (flat[other],)
        unused = [name for name in names.split() if name in given]
        if not unused or {*actual} & {*values}:
            continue
        flag = options[other].flag
        if values == (True,):
            _refuse(unused[0], given, f"goes with {flag}, which was not given")
        required, instead = " or ".join(values), ", ".join(sorted(actual))
        _refuse(unused[0], given, f"goes with {flag} {required}, not with {instead}")
    for name in ("pipeline", "microbatches", "chunks", "executor"):
        if name in given and config.mesh.num_stages == 1:
            _refuse(name, given, "goes with a stage of 2 or more in --mesh")
    if given.get("on_nan") == "rollback" and not (flat["checkpoint_every"] or flat["resume"]):
        raise ValueError("--on-nan rollback needs --checkpoint-every, for something to go back to")
    if given.get("shard_state") and not flat["exact_average"]:
        raise ValueError("--shard-state does not go with --no-exact-average, which shards nothing")
    if given.get("shard_state") and flat["codec"] != "none":
        raise ValueError(
            f"--shard-state does not go with --codec {flat['codec']}, which needs a whole anchor"
        )


def _refuse(name: str, given: Mapping[str, Any], why: str) -> None:
    flag, value = train_options()[name].flag, given[name]
    if isinstance(value, bool):  # a switch has no value
        raise ValueError(f"{flag if value else f'--no-{flag[2:]}'} {why}")
    raise ValueError(f"{flag} {why}; got {value}")
