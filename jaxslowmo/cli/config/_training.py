"""The options of `jaxslowmo train`: its configuration, defaults of presets, what goes together."""

import contextlib
import dataclasses
import math
import zlib
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from jaxslowmo.topology import GRAPHS, Mixing, self_weighted, uniform_mixing

from .._errors import as_flag
from ._cluster import ClusterOptions
from ._options import (
    Called,
    Count,
    Form,
    Natural,
    NotNegative,
    OneOf,
    Option,
    Options,
    Range,
    Seed,
    Share,
    options_of,
)

MOST_LOSS_SCALE = 2**24  # the loss scale stops growing there
_UNDER_A_MILLION = Range(1, 2**20)
_OF_A_START = (
    "resume", "overwrite", "coordinator", "coordinator_bind", "num_processes", "process_id",
)  # fmt: skip
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
    "40m": {
        "steps": 6000, "batch": 16, "learning_rate": 8e-4, "warmup": 200, "eval_every": 500,
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


# From slow links to fast ones: devices that are neighbours along the last axis are the closest.
AXES = ("replica", "device", "stage", "fsdp", "tensor")
# The axes over which a model is split; the axis "device" splits only the batch.
MODEL_AXES = ("stage", "fsdp", "tensor")
# Copies of the library's lists, because importing those loads jax; a test compares them.
PIPELINES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zbv", "lockstep")
EXECUTORS = ("one_program", "host")
RATE_SCHEDULES = ("cosine", "constant")  # of the learning rate
# How each is built, and drawn in a picture, the recipes of run/ hold.
ALGORITHMS = ("all_reduce", "local_sgd", "sgp", "slowmo", "slowmo_sgp", "diloco")
OUTER_ALGORITHMS = ("slowmo", "slowmo_sgp", "diloco")  # those with slow steps
_TICKS_PER_STAGE = 4  # the most microbatches per stage, without --microbatches


def parse_mesh(text: str) -> dict[str, int]:
    """Return axis sizes by name from a text like "replica=2,stage=2", in the order of `AXES`.

    Raises:
      ValueError: an axis is unknown or named twice, or a size is not a positive integer.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (x.strip() for x in part.partition("="))
        is_size = size.isascii() and size.isdigit() and 0 < int(size) < 2**20
        if name not in AXES or name in sizes or not is_size:
            raise ValueError(
                f"--mesh must be sizes of the axes {', '.join(AXES)}, each at most once, such as "
                f"replica=2,stage=2,fsdp=2; got {part.strip() or 'nothing'}"
            )
        sizes[name] = int(size)
    return {name: sizes[name] for name in AXES if name in sizes}


def _check_pipeline(flag: str, kind: str) -> None:
    if kind in RATE_SCHEDULES:
        raise ValueError(
            f"{flag} is that of a pipeline, and --rate-schedule that of the learning rate; got "
            f"{flag} {kind}"
        )


@dataclasses.dataclass(frozen=True)
class DeviceOptions(Options):
    """The devices of a run, by the axes of their mesh, and the pipeline along the axis "stage"."""

    HEADING = "Device"

    replicas: Count = 4
    """Data-parallel replicas."""
    devices_per_replica: Count = 1
    """Devices that share a replica's batch (two levels)."""
    mesh: Annotated[str | None, lambda flag, text: parse_mesh(text)] = None
    """Sizes of the mesh axes, such as replica=2,stage=2,fsdp=2, instead of --replicas and
    --devices-per-replica. Axes: replica; device, which splits a batch; stage, of a pipeline; fsdp
    and tensor, which split the model."""
    execution: Annotated[str, OneOf("auto", "devices", "virtual")] = "auto"
    """Give each replica a device, put all replicas on one device (virtual), or choose by the number
    of devices (auto)."""
    mode: Annotated[str, OneOf("traced", "host")] = "traced"
    """Compile one program for all steps (traced), or one for each kind of step, chosen on the
    host."""
    pipeline: Annotated[str, _check_pipeline, OneOf(*PIPELINES), Called("--schedule")] = (
        "one_f_one_b"
    )
    """Order of the operations of each pipeline stage; see jaxslowmo inspect schedule."""
    microbatches: Count | None = None
    """Parts into which a batch is cut for the pipeline (default: as many as divide the batch, up to
    4 per stage)."""
    chunks: Count | None = None
    """Parts of the model on each stage (default: 2 for interleaved and zbv, else 1)."""
    executor: Annotated[str, OneOf(*EXECUTORS)] = "one_program"
    """Run all stages in one program, or let the host start the programs of each stage, which wait
    less for each other but need a single process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, axis in _OF_MESH.items():
            size, value = self.mesh_sizes.get(axis, 1), getattr(self, name)
            if self.mesh is not None and size != value:
                flag = as_flag(name)
                raise ValueError(
                    f"--mesh and {flag} contradict each other: {self.mesh} has {size} along "
                    f"{axis}, got {value}; leave {flag} out"
                )

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The sizes of the axes in `--mesh`, by name."""
        return {} if self.mesh is None else parse_mesh(self.mesh)

    @property
    def model_axes(self) -> dict[str, int]:
        """The sizes of the axes that split the model, by name; axes of size 1 are left out."""
        return {name: n for name, n in self.mesh_sizes.items() if name in MODEL_AXES and n > 1}

    @property
    def num_stages(self) -> int:
        """The number of stages of the pipeline; 1 without a pipeline."""
        return self.mesh_sizes.get("stage", 1)

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh axes, by name."""
        inner = {"device": self.devices_per_replica} if self.devices_per_replica > 1 else {}
        return {"replica": self.replicas, **inner, **self.model_axes}

    @property
    def devices_of_a_replica(self) -> int:
        """The number of devices of one replica: the product of all axes but "replica"."""
        return math.prod(self.axes.values()) // self.replicas

    @property
    def shares_of_a_batch(self) -> int:
        """The number of parts of a replica's batch that its devices compute side by side."""
        return self.devices_per_replica * self.model_axes.get("fsdp", 1)

    def check_processes(self, count: int) -> None:
        """Raise `ValueError` if there are several processes but the executor needs a single one."""
        if self.executor == "host" and count > 1:
            raise ValueError(
                "--executor host starts the programs of all stages from a single process, got "
                f"{count} processes: use --executor one_program, which several can run"
            )


def parse_mixing(text: str) -> Mixing:
    """Return the mixing that a text like "uniform" or "self_weighted:0.7" names.

    Raises:
      ValueError: the text is neither, or the share is outside (0, 1).
    """
    name, colon, share = text.partition(":")
    if name == "uniform" and not colon:
        return uniform_mixing()
    if name == "self_weighted":
        try:
            return self_weighted(float(share))
        except ValueError:
            pass  # not a number, or not between 0 and 1
    raise ValueError(
        "--mixing must be uniform, or self_weighted:SHARE with a share between 0 and 1, such as "
        f"self_weighted:0.7; got {text}"
    )


MixingName = Annotated[str, lambda flag, text: parse_mixing(text)]

CODECS = ("bfloat16", "float16", "fp8", "int8", "int4")


def parse_codec(flag: str, text: str) -> tuple[str, float | None]:
    """Return the name of a codec, and the fraction of a text like "top_k:0.02".

    Raises:
      ValueError: the text names no codec, or the fraction is outside (0, 1].
    """
    name, colon, fraction = text.partition(":")
    if name in ("none", *CODECS) and not colon:
        return name, None
    if name == "top_k":
        with contextlib.suppress(ValueError):  # not a number
            if 0 < float(fraction) <= 1:
                return name, float(fraction)
    raise ValueError(
        f"{flag} must be one of none, {', '.join(CODECS)}, or top_k:FRACTION with a fraction in "
        f"(0, 1], such as top_k:0.02; got {text}"
    )


@dataclasses.dataclass(frozen=True)
class AlgorithmOptions(Options):
    """The algorithm of a run and its settings; `GOES_WITH` says which go together."""

    HEADING = "Algorithm"

    algorithm: Annotated[str, OneOf(*ALGORITHMS)] = "slowmo"
    """What replicas exchange: gradients at every step (all_reduce), parameters with a few peers at
    every step (sgp), parameters with all replicas every few steps (local_sgd, diloco, and slowmo
    over local_sgd). slowmo_sgp is slowmo over sgp."""
    bucket_mib: Annotated[float, Range(0, 2**20)] = 25
    """Size of the gradient buckets of all_reduce in MiB; the first has at most 1. jaxslowmo tune
    buckets measures it."""
    sync_every: Count = 12
    """Steps between averages (local_sgd, slowmo)."""
    slow_every: Count = 48
    """Steps between slow (outer) steps of slowmo and diloco."""
    graph: Annotated[str, OneOf(*GRAPHS)] = "npeer_directed_exponential"
    """Graph that says who sends to whom in sgp; jaxslowmo inspect graph shows it."""
    peers_per_step: Count | None = None
    """Peers that a replica sends to in a step of sgp (default: the graph's)."""
    overlap: Annotated[int, Range(0, 2**10)] = 0  # each is a copy of the parameters in memory
    """With sgp: 0 sends the new parameters; 1 sends the parameters from before the step while
    gradients are computed (with --mode host, or a graph that does not rotate); k mixes in what was
    sent k - 1 steps earlier."""
    mixing: MixingName = "uniform"
    """Weight that a replica of sgp gives to its own parameters: that of each peer (uniform), or
    self_weighted:SHARE."""
    slow_momentum: Share = 0.5
    """Momentum of slowmo's slow step."""
    slow_learning_rate: NotNegative = 1.0
    """Step size of slowmo's slow step."""
    nesterov: bool = False
    """Use the Nesterov form of slowmo's slow step."""
    shard_state: bool = True
    """Shard the state of the slow step over the replicas (slowmo, diloco)."""
    exact_average: bool = True
    """Average the parameters in slowmo's slow step; without it the slow step uses what its base
    left, and its state is not sharded."""
    fragments: Count = 1
    """Number of parts of the model that are exchanged at different steps of the period (slowmo and
    diloco: in the slow step)."""
    delay: Natural = 0
    """Number of steps that run while an exchange is in progress, before its result is applied."""
    merge: NotNegative = 0.0
    """Fraction of the difference between its own parameters and the result that a replica keeps: 0
    takes the result, 1 its own parameters."""
    inner_state: Annotated[str, OneOf("keep", "reset", "average")] = "keep"
    """Keep, reset or average the moments of the optimizer in an exchange (of slowmo and diloco: in
    a slow step). To average them costs their bytes."""
    codec: Annotated[str, parse_codec] = "none"
    """Send fewer bits, with error feedback: bfloat16, float16, fp8, int8, int4, or the largest
    elements, such as top_k:0.02. sgp sends parameters, in 16 bits at least; the others send how far
    replicas have moved."""
    outer_learning_rate: NotNegative = 0.7
    """Learning rate of diloco's outer optimizer (SGD)."""
    outer_momentum: Share = 0.9
    """Nesterov momentum of diloco's outer optimizer."""


@dataclasses.dataclass(frozen=True)
class IslandOptions(Options):
    """The run of several islands, in whose rounds the slow steps of an algorithm are made."""

    HEADING = "Island"

    islands: str | None = None
    """Run of several islands: a folder, or s3://BUCKET/RUN, gs://... or az://... With slowmo and
    diloco every slow step is a round of all islands there. Between rounds the replicas of an island
    average every --sync-every steps (slowmo) or train independently (diloco). --codec is that of
    what goes to the store."""
    island: Annotated[
        str | None, Form(r"[A-Za-z0-9][\w.-]{0,63}", "up to 64 letters, digits, _, . and -")
    ] = None
    """Name of this island, which no other one has. Each name gives another order of batches with
    the same --seed; the first parameters are those of the run."""
    quorum: Count = 1
    """Islands that a round needs at least."""
    deadline_seconds: NotNegative = 600.0
    """Seconds to wait for the islands of the last round, where there is a quorum."""
    late: Annotated[
        str,
        Form(
            r"drop|carry(:0?\.\d*[1-9]\d*|:1)?",
            "drop, carry, or carry:SHARE with a share in (0, 1]",
        ),
    ] = "drop"
    """After a round that closed without this island: drop its progress, carry it over to the next
    round, or a share of it, such as carry:0.5."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.islands is None) != (self.island is None):
            raise ValueError(
                "--islands and --island go together: a run, and the name of an island in it"
            )


@dataclasses.dataclass(frozen=True)
class CheckpointOptions(Options):
    """The checkpoints of a run, and what it does when its loss is not finite."""

    HEADING = "Checkpoint"

    checkpoint_every: Natural = 0
    """Save to OUT/checkpoints every so many steps; 0: only when SIGTERM or Ctrl-C ends the run
    early."""
    keep: Count = 3
    """Keep this many checkpoints, the newest ones."""
    resume: bool = False
    """Continue from the newest checkpoint in --out; start from scratch if there is none."""
    fallback: bool = False
    """With --resume, and when --restarts starts the run again: if the newest checkpoint is damaged,
    take the one before."""
    max_failed_saves: Count = 3
    """End the run after this many consecutive failed saves, or if the last save fails."""
    export: bool = False
    """Write the averaged model to OUT/model at the end."""
    check_parameters: bool = False
    """Before every exchange of parameters check that those of all replicas are finite (4 bytes). If
    not, skip the exchange and do as --on-nan says."""
    on_nan: Annotated[str, OneOf("stop", "rollback")] = "stop"
    """When the loss is not finite: stop, or go back to the last checkpoint and skip the batches
    since then."""
    max_rollbacks: Count = 3
    """With --on-nan rollback: stop after this many rollbacks."""


@dataclasses.dataclass(frozen=True)
class OptimizerOptions(Options):
    """The optimizer of each replica, and the learning rate schedule that slowmo uses, too."""

    HEADING = "Optimizer"

    optimizer: Annotated[str, OneOf("adamw", "sgd")] = "adamw"
    """Optimizer inside each replica."""
    learning_rate: NotNegative = 1e-3
    """Peak learning rate."""
    warmup: Natural = 30
    """Steps of linear warm-up from 0."""
    schedule: Annotated[str, OneOf(*RATE_SCHEDULES), Called("--rate-schedule")] = "cosine"
    """Learning rate after the warm-up: falls to a tenth of the peak at the last step (cosine), or
    stays at the peak (constant)."""
    schedule_steps: Count | None = None
    """Number of steps that --rate-schedule spans (default: --steps; a resumed run keeps its
    number)."""
    weight_decay: NotNegative = 0.1
    """AdamW's weight decay."""
    clip: NotNegative = 1.0
    """Clip the gradient of the whole model to this norm; 0: do not clip."""


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
    """Use the embedding table as the output layer, too."""
    loss_scale: Annotated[NotNegative, _check_loss_scale] = 2.0**16
    """Initial scale of the loss, which adapts to overflows; 0: do not scale."""
    loss_scale_interval: Count = 2000
    """Double the scale of the loss after this many updates without overflow."""


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
    """Number of batches that are loaded and put on the devices ahead of their steps; 0: none."""
    seed: Seed = 0
    """Seed of parameters and batches."""
    data: str | None = None
    """A text file or a folder of them (default: the standard library's source)."""
    overwrite: bool = False
    """First delete what an earlier run or comparison left in --out."""
    eval_every: Count = 50
    """Steps between evaluations of the averaged model."""
    eval_batches: Annotated[int, _UNDER_A_MILLION] = 8
    """Batches (about 8 kB each) of an evaluation."""
    patience: Natural = 0
    """End the run after this many consecutive evaluations without a smaller validation loss; 0:
    never."""
    log_every: Count = 10
    """Steps between lines of metrics."""
    tensorboard: bool = False
    """Write the metrics to OUT/tensorboard, too, for TensorBoard."""
    statistics: bool = False
    """Measure what steps spend their time on; print a table and write statistics.json."""
    statistics_rate: Count = 100
    """With --statistics: measure one step in this many, after the first ten."""


@dataclasses.dataclass(frozen=True)
class TrainConfig(
    ClusterOptions, CheckpointOptions, OptimizerOptions, IslandOptions, AlgorithmOptions,
    DeviceOptions, _TrainingOptions, _ModelOptions,
):  # fmt: skip
    """The configuration of one training run."""

    # The names in `KEPT` that nobody gave.
    not_given: Annotated[tuple[str, ...], Called(None)] = ()

    def values(self) -> dict[str, Any]:
        """Return the values of all options by field name."""
        return {name: getattr(self, name) for name in train_options()}

    def to_file(self) -> dict[str, Any]:
        """Return the values under the names of options, for config.json, which `--config` reads.

        How this run was started is left out: the next one starts in its own way.
        """
        return {
            option.flag[2:].replace("-", "_"): getattr(self, name)
            for name, option in train_options().items()
            # The schedule spans the steps of the next run, unless somebody has said otherwise.
            if name not in _OF_A_START and not (name == "schedule_steps" and name in self.not_given)
        }

    @property
    def data_seed(self) -> int:
        """The seed of the order of batches, which differs between islands."""
        return (self.seed + zlib.crc32((self.island or "").encode())) % 2**32

    @property
    def rows(self) -> int:
        """The windows of one forward pass on each group of devices that splits a model."""
        return self.batch // (self.accumulate * self.shares_of_a_batch)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches that go through the pipeline stages; 1 without stages."""
        if self.num_stages == 1:
            return 1
        if self.microbatches is not None:
            return self.microbatches
        most = _TICKS_PER_STAGE * self.num_stages
        fit = [m for m in range(1, most + 1) if self.rows % m == 0]
        # A multiple of the number of stages, if possible: the interleaved schedule needs one.
        return max([m for m in fit if m % self.num_stages == 0] or fit)

    @property
    def schedule_length(self) -> int:
        """The number of steps of the learning rate schedule."""
        return self.schedule_steps or self.steps

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = self.accumulate * self.shares_of_a_batch
        if self.batch % shares:
            raise ValueError(
                "--batch must be a multiple of --accumulate times --devices-per-replica times the "
                f"size of fsdp in --mesh = {shares}, got {self.batch}"
            )
        if self.rows % self.num_microbatches:
            raise ValueError(
                f"--microbatches must divide the {self.rows} windows of --batch that devices "
                f"compute together, got {self.microbatches}"
            )
        if self.warmup >= self.schedule_length:
            name = "--schedule-steps" if self.schedule_steps else "--steps"
            raise ValueError(
                f"--warmup must be < {name}, got {self.warmup} and {self.schedule_length}"
            )
        if self.overwrite and self.resume:
            raise ValueError(
                "--overwrite deletes what --resume would go on from: give one of them, not both"
            )


# A resumed run keeps its earlier values of these, unless the command line gives new ones.
KEPT = ("steps", "warmup", "schedule_steps")


def train_options() -> dict[str, Option]:
    """Return all options of `train`, by the names of their fields."""
    return options_of(TrainConfig)


def train_config(options: Mapping[str, Any], file: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the configuration: values of `options`, else of a file, the preset, the defaults.

    Args:
      options: values by field name; None: not given.
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
        default = values.get("warmup", TrainConfig.warmup)
        values["warmup"] = min(default, length // 10)
    if "mesh" in given:
        # --mesh gives these sizes, so those of a preset, or of a file, no longer count.
        sizes = parse_mesh(given["mesh"])
        values |= {name: sizes.get(axis, 1) for name, axis in _OF_MESH.items()}
        values |= options if "mesh" in options else given
    not_given = tuple(name for name in KEPT if name not in given)
    return TrainConfig(**values, not_given=not_given)


# Options, and with which values of another one they have an effect.
GOES_WITH: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("bucket_mib", "algorithm", ("all_reduce",)),
    ("sync_every", "algorithm", ("local_sgd", "slowmo")),
    ("graph peers_per_step overlap mixing", "algorithm", ("sgp", "slowmo_sgp")),
    ("slow_momentum slow_learning_rate nesterov", "algorithm", ("slowmo", "slowmo_sgp")),
    ("exact_average", "algorithm", ("slowmo", "slowmo_sgp")),
    ("slow_every shard_state", "algorithm", ("slowmo", "slowmo_sgp", "diloco")),
    (
        "fragments delay merge inner_state",
        "algorithm",
        ("local_sgd", "slowmo", "slowmo_sgp", "diloco"),
    ),
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
      given: values of the command line by field name.
      config: the configuration made of them, with file, preset and defaults.
      algorithms: the algorithms that are trained; () is the one of `config`.

    Raises:
      ValueError: the message names the first such option, its value, and what it goes with.
    """
    options = train_options()
    for names, other, values in GOES_WITH:
        actual = algorithms if other == "algorithm" and algorithms else (getattr(config, other),)
        unused = [name for name in names.split() if name in given]
        if not unused or {*actual} & {*values}:
            continue
        flag = options[other].flag
        if values == (True,):
            _refuse(unused[0], given, f"goes with {flag}, which was not given")
        required, instead = " or ".join(values), ", ".join(sorted(actual))
        _refuse(unused[0], given, f"goes with {flag} {required}, not with {instead}")
    for name in ("pipeline", "microbatches", "chunks", "executor"):
        if name in given and config.num_stages == 1:
            _refuse(name, given, "goes with a stage of 2 or more in --mesh")
    if config.islands is not None:
        _refuse_beside_islands(given, config)
    for name in ("quorum", "deadline_seconds", "late"):
        if name in given and config.islands is None:
            _refuse(name, given, "goes with --islands, which was not given")
    if given.get("on_nan") == "rollback" and not (config.checkpoint_every or config.resume):
        raise ValueError("--on-nan rollback needs --checkpoint-every, for something to go back to")
    if given.get("check_parameters") and config.algorithm == "all_reduce":
        raise ValueError(
            "--check-parameters does not go with --algorithm all_reduce, which exchanges "
            "gradients: the loss shows it"
        )
    if given.get("shard_state") and not config.exact_average:
        raise ValueError("--shard-state does not go with --no-exact-average, which shards nothing")
    if given.get("shard_state") and config.codec.startswith("top_k"):
        raise ValueError(
            f"--shard-state does not go with --codec {config.codec}, which needs a whole anchor"
        )
    if config.codec not in ("none", "bfloat16", "float16") and "sgp" in config.algorithm:
        raise ValueError(
            f"--codec {config.codec} does not go with --algorithm {config.algorithm}, which sends "
            "parameters themselves: use bfloat16 or float16"
        )


def _refuse_beside_islands(given: Mapping[str, Any], config: TrainConfig) -> None:
    """Raise `ValueError` for options that slow steps have and rounds of islands do not."""
    unused = ("fragments", "inner_state", "shard_state", "exact_average")
    flags = {train_options()[name].flag: name in given for name in unused} | {
        f"--algorithm {config.algorithm}": config.algorithm not in ("slowmo", "diloco"),
        f"--mesh {config.mesh}": config.num_stages > 1,
        "--check-parameters": config.check_parameters,
        "--on-nan rollback": config.on_nan == "rollback",
    }
    if any(flags.values()):
        wrong = ", ".join(flag for flag, is_there in flags.items() if is_there)
        raise ValueError(f"--islands does not go with {wrong}; it goes with slowmo and diloco")


def _refuse(name: str, given: Mapping[str, Any], why: str) -> None:
    flag, value = train_options()[name].flag, given[name]
    if isinstance(value, bool):  # a switch has no value
        raise ValueError(f"{flag if value else f'--no-{flag[2:]}'} {why}")
    raise ValueError(f"{flag} {why}; got {value}")
