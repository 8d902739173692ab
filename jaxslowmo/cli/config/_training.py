"""The configuration of `jaxslowmo train`, its parts, and the defaults of each preset."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from ._algorithms import AlgorithmConfig
from ._cluster import ClusterConfig
from ._fields import Checked, option, options_of
from ._mesh import MeshConfig, check_mesh, parse_mesh

OPTIMIZERS = ("adamw", "sgd")
SCHEDULES = ("cosine", "constant")
EXECUTIONS = ("auto", "devices", "virtual")
MODES = ("traced", "host")
DTYPES = ("float32", "bfloat16", "float16")
ATTENTIONS = ("xla", "cudnn")
MOST_LOSS_SCALE = 2**24  # the loss scale stops growing there
# jax uses 32 bits of a seed: seeds that differ only in higher bits give the same keys.
MOST_SEEDS = 2**32
ON_NAN = ("stop", "rollback")

_model_option = functools.partial(option, panel="Model")
_training_option = functools.partial(option, panel="Training")
_device_option = functools.partial(option, panel="Devices")
_optimizer_option = functools.partial(option, panel="Optimizer")
_checkpoint_option = functools.partial(option, panel="Checkpoints")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Checked):
    """The checkpoints of a run, and what it does when its loss is not finite."""

    checkpoint_every: int = _checkpoint_option(
        0,
        "Steps between checkpoints in OUT/checkpoints; 0: only when SIGTERM or Ctrl-C ends the "
        "run early.",
        least=0,
    )
    keep: int = _checkpoint_option(3, "Checkpoints to keep, the newest.", least=1)
    resume: bool = _checkpoint_option(
        False, "Go on from the newest checkpoint in --out; from scratch where there is none."
    )
    fallback: bool = _checkpoint_option(
        False,
        "With --resume, also of a start that --restarts adds: where the newest checkpoint is "
        "damaged, take the one before.",
    )
    max_failed_saves: int = _checkpoint_option(
        3,
        "Saves in a row that may fail, say on a full disk; after so many the run ends, as it does "
        "where the last one fails.",
        least=1,
    )
    export: bool = _checkpoint_option(False, "Write the consensus model to OUT/model at the end.")
    check_parameters: bool = _checkpoint_option(
        False,
        "Before every exchange of parameters ask all replicas whether theirs are finite (4 bytes), "
        "and do not exchange where one's are not, but do as --on-nan says.",
    )
    on_nan: str = _checkpoint_option(
        "stop",
        "When the loss is not finite: stop, or go back to the last checkpoint and leave out the "
        "batches since then.",
        choices=ON_NAN,
    )
    max_rollbacks: int = _checkpoint_option(
        3,
        "With --on-nan rollback: stop after this many rollbacks.",
        least=1,
        goes_with=("on_nan", ("rollback",)),
    )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Checked):
    """The optimizer of each replica, and the learning rate schedule that slowmo uses, too."""

    optimizer: str = _optimizer_option(
        "adamw", "Optimizer inside each replica.", choices=OPTIMIZERS
    )
    learning_rate: float = _optimizer_option(1e-3, "Peak learning rate.", least=0)
    warmup: int = _optimizer_option(30, "Steps of linear warm-up from 0.", least=0)
    schedule: str = _optimizer_option(
        "cosine",
        "After the warm-up: down to a tenth of the peak at the schedule's last step (cosine), or "
        "the peak.",
        choices=SCHEDULES,
        flag="--rate-schedule",
    )
    schedule_steps: int | None = _optimizer_option(
        None,
        "Steps that --rate-schedule spans (default: --steps; of a resumed run: what it was).",
        least=1,
        goes_with=("schedule", ("cosine",)),
    )
    weight_decay: float = _optimizer_option(
        0.1, "AdamW's weight decay.", least=0, goes_with=("optimizer", ("adamw",))
    )
    clip: float = _optimizer_option(
        1.0,
        "Largest norm of a gradient of the whole model, as the optimizer gets it; 0: any.",
        least=0,
    )


@dataclasses.dataclass(frozen=True)
class TrainConfig(Checked):
    """The configuration of one training run."""

    preset: str = _model_option("1m", "Size of the model, and defaults that suit it.")
    dtype: str = _model_option(
        "float32", "Dtype of activations and products; parameters are float32.", choices=DTYPES
    )
    attention: str = _model_option(
        "xla",
        "Attention by XLA, on any device, or by NVIDIA's cuDNN, on GPUs.",
        choices=ATTENTIONS,
        goes_with=("dtype", ("bfloat16", "float16")),
    )
    tied: bool = _model_option(False, "The embedding's table is the output layer, too.")
    loss_scale: float = _model_option(
        2.0**16,
        "First scale of the loss, which then follows overflows; 0: none.",
        least=0,
        goes_with=("dtype", ("float16",)),
    )
    loss_scale_interval: int = _model_option(
        2000,
        "Updates without overflow after which the scale of the loss doubles.",
        least=1,
        goes_with=("dtype", ("float16",)),
    )
    steps: int = _training_option(300, "Optimizer steps.", least=1)
    batch: int = _training_option(8, "Windows per replica and step.", least=1, below=2**20)
    accumulate: int = _training_option(1, "Microbatches per step.", least=1)
    prefetch: int = _training_option(
        2,
        "Batches that are loaded, and put on the devices, ahead of their steps; 0: none.",
        least=0,
        below=2**20,
    )
    seed: int = _training_option(0, "Seed of parameters and batches.", least=0, below=MOST_SEEDS)
    data: str | None = _training_option(
        None, "A text file or a folder of them (default: the standard library's source)."
    )
    overwrite: bool = _training_option(
        False, "First delete what an earlier run or comparison left in --out."
    )
    eval_every: int = _training_option(
        50, "Steps between evaluations of the consensus model.", least=1
    )
    eval_batches: int = _training_option(
        8, "Batches (about 8 kB each) of an evaluation.", least=1, below=2**20
    )
    patience: int = _training_option(
        0,
        "Evaluations in a row without a smaller validation loss after which the run ends; 0: none.",
        least=0,
    )
    log_every: int = _training_option(10, "Steps between lines of metrics.", least=1)
    tensorboard: bool = _training_option(
        False, "Write the metrics to OUT/tensorboard, too, for TensorBoard."
    )
    statistics: bool = _training_option(
        False,
        "Measure what steps spend their time on: a table, and statistics.json next to the metrics.",
    )
    statistics_rate: int = _training_option(
        100,
        "With --statistics: measure every so many steps, after the first ten.",
        least=1,
        goes_with=("statistics", (True,)),
    )
    replicas: int = _device_option(4, "Data-parallel replicas.", least=1)
    devices_per_replica: int = _device_option(
        1, "Devices that share a replica's batch (two levels).", least=1
    )
    execution: str = _device_option(
        "auto",
        "A device per replica, virtual replicas on one device, or whichever the machine allows.",
        choices=EXECUTIONS,
    )
    mode: str = _device_option(
        "traced",
        "One program for all steps, or one per kind of step chosen on the host.",
        choices=MODES,
    )
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    # The names in `KEPT` that are not on the command line; not an option itself.
    not_given: tuple[str, ...] = ()

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
        return {} if self.mesh.mesh is None else self.mesh.model_axes

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


# A resumed run keeps its earlier values of these, unless the command line gives new ones.
KEPT = ("steps", "warmup", "schedule_steps")

# Values that differ from the defaults above, by preset of the model.
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


PARTS: dict[str, Any] = {
    field.name: field.default_factory
    for field in dataclasses.fields(TrainConfig)
    if field.default_factory is not dataclasses.MISSING
}


@functools.cache
def train_options() -> Mapping[str, dataclasses.Field[Any]]:
    """Return the fields of all options of `TrainConfig` and its parts, by name."""
    configs = (TrainConfig, *PARTS.values())
    return {name: field for config in configs for name, field in options_of(config).items()}


def train_config(options: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration: values of `options`, else of the preset, else the defaults.

    Args:
      options: values by field name, of `TrainConfig` and its parts; None: not given.

    Raises:
      ValueError: a value breaks the rule of its option, or the preset is unknown.
    """
    options = {name: value for name, value in options.items() if value is not None}
    preset = options.get("preset", TrainConfig.preset)
    if preset not in PRESET_DEFAULTS:
        raise ValueError(f"--preset must be one of {', '.join(PRESET_DEFAULTS)}, got {preset}")
    values = {**PRESET_DEFAULTS[preset], **options}
    length = options.get("schedule_steps", options.get("steps", 0))
    if "warmup" not in options and length >= 1:
        # The warm-up of a preset suits the preset's own number of steps.
        default = values.get("warmup", OptimizerConfig.warmup)
        values["warmup"] = min(default, length // 10)

    if options.get("pipeline") in SCHEDULES:
        raise ValueError(
            f"--schedule is that of a pipeline, and --rate-schedule that of the learning rate; got "
            f"--schedule {options['pipeline']}"
        )
    if "mesh" in options:
        # --mesh gives these sizes, so those of a preset no longer count.
        sizes = parse_mesh(options["mesh"])
        of_mesh = {"replicas": "replica", "devices_per_replica": "device"}
        values |= {name: sizes.get(axis, 1) for name, axis in of_mesh.items()} | options
    not_given = tuple(name for name in KEPT if name not in options)
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
