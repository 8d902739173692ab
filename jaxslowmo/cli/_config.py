"""The configurations of all commands, and how they are read. No jax.

They are frozen dataclasses whose fields are options; tyro refuses unknown names and wrong values.
The text below a field is its help. Fields that few set are `Hidden`: only a file of `--config` sets
them. The names of all options of a command differ, so that a file needs no sections.
"""

import contextlib
import dataclasses
import difflib
import functools
import io
import json
import math
import re
import types
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import tyro

from .._support.checks import ArgumentError, warn_user
from ._errors import CommandError

Hidden = tyro.conf.Suppress
Config = TypeVar("Config")

# Values that differ from the defaults below, by preset of the model.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"steps": 48, "batch": 4, "learning_rate": 1e-2, "eval_every": 24, "eval_batches": 1},
    "demo": {
        "steps": 192, "batch": 4, "learning_rate": 2e-3, "eval_every": 24, "eval_batches": 2,
        "slow_momentum": 0.2,  # few replicas need a smaller one
    },
    "1m": {},
    "10m": {"steps": 2000, "batch": 16, "eval_every": 200, "eval_batches": 16},
    "40m": {
        "steps": 6000, "batch": 16, "learning_rate": 8e-4, "eval_every": 500, "eval_batches": 16,
    },
    "124m": {
        "steps": 20000, "batch": 16, "learning_rate": 6e-4, "eval_every": 500, "eval_batches": 32,
    },
    "7b": {
        "steps": 100000, "batch": 8, "learning_rate": 3e-4, "eval_every": 1000,
        "eval_batches": 32, "dtype": "bfloat16",
    },
}  # fmt: skip
_WARMUP = {"demo": 16, "10m": 100, "40m": 200, "124m": 500, "7b": 2000}  # without --warmup
# From slow links to fast ones: devices that are neighbours along the last axis are the closest.
AXES = ("replica", "device", "stage", "fsdp", "tensor")
# The axes over which a model is split; the axis "device" splits only the batch.
MODEL_AXES = ("stage", "fsdp", "tensor")
_TICKS_PER_STAGE = 4  # the most microbatches per stage, without `microbatches`
# What neither the library nor a type refuses.
_COUNTS = """
    steps batch accumulate replicas eval_every eval_batches log_every keep max_failed_saves quorum
    schedule_steps num_processes startup_timeout processes tokens microbatches loss_scale_interval
    peers_per_step
"""
# The algorithms that read an option.
_SLOW = "slowmo slowmo_sgp"
_USERS = {
    "bucket_mib": "all_reduce",
    "sync_every": "local_sgd slowmo",
    **dict.fromkeys(("graph", "overlap", "peers_per_step", "mixing"), "sgp slowmo_sgp"),
    **dict.fromkeys(("slow_momentum", "slow_learning_rate", "nesterov", "exact_average"), _SLOW),
    **dict.fromkeys(("outer_learning_rate", "outer_momentum"), "diloco"),
    **dict.fromkeys(("slow_every", "shard_state"), f"{_SLOW} diloco"),
    **dict.fromkeys(("fragments", "delay", "merge", "inner_state"), f"local_sgd {_SLOW} diloco"),
    **dict.fromkeys(("codec", "check_parameters"), f"local_sgd sgp {_SLOW} diloco"),
}
_NOT_NEGATIVE = """
    seed checkpoint_every warmup learning_rate weight_decay clip prefetch patience restarts
    max_rollbacks process_id stall_timeout loss_scale step temperature top_k deadline_seconds
    bucket_mib
"""
_LEAST = {"heartbeat_timeout": 2}
_LEAST |= dict.fromkeys(_COUNTS.split(), 1) | dict.fromkeys(_NOT_NEGATIVE.split(), 0)
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "text"}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model, and the dtype in which it computes."""

    preset: Literal["tiny", "demo", "1m", "10m", "40m", "124m", "7b"] = "1m"
    """Size of the model, and defaults of other options that suit it."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of activations and products; parameters are float32."""
    attention: Annotated[Literal["xla", "cudnn"], Hidden] = "xla"
    """Attention by XLA, on any device, or by NVIDIA's cuDNN, on GPUs in 16 bits."""
    tied: Annotated[bool, Hidden] = False
    """Use the embedding table as the output layer, too."""
    loss_scale: Annotated[float, Hidden] = 2.0**16
    """With float16: initial scale of the loss, which adapts to overflows; 0: do not scale."""
    loss_scale_interval: Annotated[int, Hidden] = 2000
    """Double the scale of the loss after this many updates without overflow."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text, and how much of it a step reads."""

    data: str | None = None
    """A text file or a folder of them (without: the source of Python's standard library)."""
    batch: int = 8
    """Windows per replica and step."""
    accumulate: int = 1
    """Parts of a batch whose gradients are computed one after another."""
    seed: int = 0
    """Seed of parameters and batches."""


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """What the replicas exchange, and when."""

    algorithm: Literal["all_reduce", "local_sgd", "sgp", "slowmo", "slowmo_sgp", "diloco"] = (
        "slowmo"
    )
    """What replicas exchange: gradients at every step (all_reduce), parameters with a few peers at
    every step (sgp), parameters with all replicas every few steps (local_sgd, diloco, and slowmo
    over local_sgd). slowmo_sgp is slowmo over sgp."""
    sync_every: int = 12
    """Steps between averages (local_sgd, slowmo)."""
    slow_every: int = 48
    """Steps between slow (outer) steps of slowmo and diloco."""
    graph: str = "npeer_directed_exponential"
    """Graph that says who sends to whom in sgp: a name of js.topology."""
    overlap: int = 0
    """With sgp: 0 sends the new parameters; 1 sends the parameters from before the step while
    gradients are computed; k mixes in what was sent k - 1 steps earlier."""
    slow_momentum: float = 0.5
    """Momentum of slowmo's slow step."""
    slow_learning_rate: float = 1.0
    """Step size of slowmo's slow step."""
    outer_learning_rate: Annotated[float, Hidden] = 0.7
    """Learning rate of diloco's outer optimizer (SGD)."""
    fragments: int = 1
    """Number of parts of the model that are exchanged at different steps of the period."""
    delay: int = 0
    """Number of steps that run while an exchange is in progress, before its result is applied."""
    codec: str = "none"
    """Send fewer bits, with error feedback: bfloat16, float16, fp8, int8, int4, or the largest
    elements, such as top_k:0.02. sgp takes 16 bits at least."""
    outer_momentum: Annotated[float, Hidden] = 0.9
    """Nesterov momentum of diloco's outer optimizer."""
    bucket_mib: Annotated[float, Hidden] = 25.0
    """Size of the gradient buckets of all_reduce in MiB; the first has at most 1."""
    peers_per_step: Annotated[int | None, Hidden] = None
    """Peers that a replica sends to in a step of sgp (without: as many as the graph has)."""
    mixing: Annotated[str, Hidden] = "uniform"
    """Weight that a replica of sgp gives to its own parameters: that of each peer (uniform), or
    self_weighted:SHARE."""
    nesterov: Annotated[bool, Hidden] = False
    """Use the Nesterov form of slowmo's slow step."""
    shard_state: Annotated[bool, Hidden] = True
    """Shard the state of the slow step over the replicas (slowmo, diloco)."""
    exact_average: Annotated[bool, Hidden] = True
    """Average the parameters in slowmo's slow step; without it the slow step uses what its base
    left, and its state is not sharded."""
    merge: Annotated[float, Hidden] = 0.0
    """Fraction of the difference between its own parameters and the result that a replica keeps."""
    inner_state: Annotated[Literal["keep", "reset", "average"], Hidden] = "keep"
    """Keep, reset or average the moments of the optimizer in an exchange."""
    check_parameters: Annotated[bool, Hidden] = False
    """Before every exchange of parameters check that those of all replicas are finite (4 bytes). If
    not, skip the exchange and do as `on_nan` says."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of each replica, and the learning rate, which slowmo uses, too."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer inside each replica."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    warmup: int | None = None
    """Steps of linear warm-up from 0 (without: a tenth of the steps, or what suits the preset)."""
    weight_decay: Annotated[float, Hidden] = 0.1
    """AdamW's weight decay."""
    rate_schedule: Annotated[Literal["cosine", "constant"], Hidden] = "cosine"
    """Learning rate after the warm-up: falls to a tenth of the peak at the last step (cosine), or
    stays at the peak (constant)."""
    clip: Annotated[float, Hidden] = 1.0
    """Clip the gradient of the whole model to this norm; 0: do not clip."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The devices of a run, by the axes of their mesh, and the pipeline along the axis "stage"."""

    replicas: int = 4
    """Data-parallel replicas."""
    mesh: str | None = None
    """Sizes of the mesh axes, such as replica=2,stage=2,fsdp=2. Axes: replica (instead of
    --replicas); device, which splits a batch; stage, of a pipeline; fsdp and tensor, which split
    the model."""
    execution: Literal["auto", "devices", "virtual"] = "auto"
    """Give each replica a device, put all replicas on one device (virtual), or choose by the number
    of devices (auto)."""
    mode: Literal["traced", "host"] = "traced"
    """Compile one program for all steps (traced), or one for each kind of step, chosen on the
    host."""
    schedule: str = "one_f_one_b"
    """Order of the operations of each pipeline stage: a name of js.schedules."""
    microbatches: Annotated[int | None, Hidden] = None
    """Parts into which a batch is cut for the pipeline (without: as many as divide the batch, up to
    4 per stage)."""
    chunks: Annotated[int | None, Hidden] = None
    """Parts of the model on each stage (without: 2 for interleaved and zbv, else 1)."""
    executor: Annotated[Literal["one_program", "host"], Hidden] = "one_program"
    """Run all stages in one program, or let the host start the programs of each stage, which wait
    less for each other but need a single process."""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of all axes by name, in the order of `AXES`; only "replica" may have size 1.

        Raises:
          ArgumentError: an axis is unknown or named twice, or a size is not a positive integer.
        """
        sizes: dict[str, int] = {}
        for part in self.mesh.split(",") if self.mesh is not None else ():
            name, _, size = (x.strip() for x in part.partition("="))
            if name not in AXES or name in sizes or not re.fullmatch("[1-9][0-9]{0,5}", size):
                rule = f"has sizes of the axes {', '.join(AXES)}, such as replica=2,stage=2"
                raise ArgumentError("mesh", f"`mesh` {rule}, each once; got {part or 'nothing'}.")
            sizes[name] = int(size)
        sizes = {"replica": self.replicas, **sizes}
        return {x: sizes[x] for x in AXES if x == "replica" or sizes.get(x, 1) > 1}

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return self.sizes["replica"]

    @property
    def model_axes(self) -> dict[str, int]:
        """The sizes of the axes that split the model, by name; axes of size 1 are left out."""
        return {name: n for name, n in self.sizes.items() if name in MODEL_AXES}

    @property
    def devices_per_replica(self) -> int:
        """The number of devices of one replica: the product of all axes but "replica"."""
        return math.prod(self.sizes.values()) // self.num_replicas

    @property
    def batch_shards(self) -> int:
        """The number of parts of a replica's batch that its devices compute side by side."""
        return self.sizes.get("device", 1) * self.sizes.get("fsdp", 1)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The length of a run, and what it writes."""

    out: Path | None = None
    """Folder for the results (without: a new one in runs, named by the command and the date)."""
    config: Path | None = None
    """YAML or JSON file with values of options by name, such as config.json of a run. They replace
    those of a preset, and options of the command line replace both."""
    overwrite: bool = False
    """First delete what an earlier run or comparison left in --out."""
    steps: int = 300
    """Optimizer steps."""
    eval_every: int = 50
    """Steps between evaluations of the averaged model."""
    log_every: int = 10
    """Steps between lines of metrics."""
    tensorboard: bool = False
    """Write the metrics to OUT/tensorboard, too, for TensorBoard."""
    eval_batches: Annotated[int, Hidden] = 8
    """Batches (about 8 kB each) of an evaluation."""
    schedule_steps: Annotated[int | None, Hidden] = None
    """Number of steps that the learning rate spans (without: --steps; a resumed run keeps its
    number)."""
    prefetch: Annotated[int, Hidden] = 2
    """Number of batches that are loaded and put on the devices ahead of their steps; 0: none."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """The checkpoints of a run, and when it ends early."""

    checkpoint_every: int | None = None
    """Save to OUT/checkpoints every so many steps and at the end (without: at the end); 0: only
    when SIGTERM or Ctrl-C ends the run early."""
    resume: bool = False
    """Continue from the newest checkpoint in --out, with the options in its config.json; start from
    scratch if there is none."""
    export: bool = False
    """Write the averaged model to OUT/model at the end."""
    keep: Annotated[int, Hidden] = 3
    """Keep this many checkpoints, the newest ones."""
    fallback: bool = False
    """When a run resumes: if the newest checkpoint is damaged, take the one before."""
    max_failed_saves: Annotated[int, Hidden] = 3
    """End the run after this many consecutive failed saves, or if the last save fails."""
    on_nan: Annotated[Literal["stop", "rollback"], Hidden] = "stop"
    """When the loss is not finite: stop, or go back to the last checkpoint and skip the batches
    since then."""
    max_rollbacks: Annotated[int, Hidden] = 3
    """With `on_nan: rollback`: stop after this many rollbacks."""
    patience: Annotated[int, Hidden] = 0
    """End the run after this many consecutive evaluations without a smaller validation loss; 0:
    never."""
    statistics: Annotated[bool, Hidden] = False
    """Measure what steps spend their time on; print a table and write statistics.json."""


@dataclasses.dataclass(frozen=True)
class IslandConfig:
    """The run of several islands, in whose rounds the slow steps of an algorithm are made."""

    islands: str | None = None
    """Run of several islands: a folder, or s3://BUCKET/RUN, gs://... or az://... With slowmo and
    diloco every slow step is a round of all islands there. --codec is that of what goes to the
    store."""
    island: str | None = None
    """Name of this island, which no other one has. Each name gives another order of batches with
    the same --seed; the first parameters are those of the run."""
    quorum: int = 1
    """Islands that a round needs at least."""
    deadline_seconds: Annotated[float, Hidden] = 600.0
    """Seconds to wait for the islands of the last round, where there is a quorum."""
    late: Annotated[str, Hidden] = "drop"
    """After a round that closed without this island: drop its progress, carry it over to the next
    round, or a share of it, such as carry:0.5."""


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """The processes that train together, and how they find each other."""

    coordinator: str | None = None
    """HOST:PORT at which process 0 waits for the others; needs --num-processes and --process-id.
    Under a launcher that jax knows, none of the three is needed."""
    num_processes: int | None = None
    """Processes that train together."""
    process_id: int | None = None
    """Number of this process, from 0."""
    cluster: Literal["auto", "none", "slurm", "ompi", "mpi4py", "k8s", "gcetpu", "gketpu"] = "auto"
    """Launcher that tells a process its number: detected from the environment (auto), none, or a
    launcher that jax.distributed knows."""
    restarts: int = 0
    """With several processes: start this process again up to so many times without a newer
    checkpoint, when another process was lost, this one was killed, or a disk was full."""
    coordinator_bind: Annotated[str | None, Hidden] = None
    """Address at which process 0 listens (without: that of --coordinator); 0.0.0.0 for all of its
    host."""
    heartbeat_timeout: Annotated[int, Hidden] = 10
    """Treat a process as lost after this many seconds of silence. Pauses of up to half of it are
    always tolerated."""
    startup_timeout: Annotated[int, Hidden] = 300
    """Seconds to wait at the start for the other processes."""
    stall_timeout: Annotated[int, Hidden] = 1800
    """End all processes, with code 75, after this many seconds in which no step ended and nothing
    was saved; 0: never."""
    process_logs: bool = False
    """Write the output of every process to OUT/logs/process-ID.txt."""


@dataclasses.dataclass(frozen=True)
class _TrainingConfig:
    """What `train` and `compare` share."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    run: RunConfig = RunConfig()

    @property
    def rows(self) -> int:
        """The windows of one forward pass on each group of devices that splits a model."""
        return self.data.batch // (self.data.accumulate * self.mesh.batch_shards)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches that go through the pipeline stages; 1 without stages."""
        stages = self.mesh.sizes.get("stage", 1)
        if stages == 1:
            return 1
        if self.mesh.microbatches is not None:
            return self.mesh.microbatches
        fit = [m for m in range(1, _TICKS_PER_STAGE * stages + 1) if self.rows % m == 0]
        # A multiple of the number of stages, if possible: the interleaved schedule needs one.
        return max([m for m in fit if m % stages == 0] or fit)

    @property
    def schedule_length(self) -> int:
        """The number of steps of the learning rate schedule."""
        return self.run.schedule_steps or self.run.steps

    @property
    def warmup_steps(self) -> int:
        """The number of steps in which the learning rate rises."""
        if self.optimizer.warmup is not None:
            return self.optimizer.warmup
        return min(_WARMUP.get(self.model.preset, 30), self.schedule_length // 10)

    def check(self) -> None:
        """Raise `ArgumentError` for values that do not go together."""
        _require("overwrite", not self.run.overwrite or self.run.out, "needs `out`, a folder")
        shares = self.data.accumulate * self.mesh.batch_shards
        rule = f"must be a multiple of {shares}, `accumulate` times the devices that split it"
        _require("batch", not self.data.batch % shares, rule, self.data.batch)
        rule = f"must divide the {self.rows} windows that devices compute together"
        count = self.num_microbatches
        _require("microbatches", not self.rows % count, rule, count)
        rule = f"must be < {self.schedule_length}, the steps of the schedule"
        _require("warmup", self.warmup_steps < self.schedule_length, rule, self.warmup_steps)


@dataclasses.dataclass(frozen=True)
class TrainConfig(_TrainingConfig):
    """Train a byte-level language model with one algorithm."""

    dry_run: bool = False
    """Train nothing: show devices, memory, and what a step would send."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    island: IslandConfig = IslandConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def data_seed(self) -> int:
        """The seed of the order of batches, which differs between islands."""
        return (self.data.seed + zlib.crc32((self.island.island or "").encode())) % 2**32

    def check(self) -> None:
        """Raise `ArgumentError` for values that do not go together."""
        super().check()
        if self.checkpoint.resume:
            _require("overwrite", not self.run.overwrite, "deletes what `resume` would go on from")
            _require("resume", self.run.out, "needs `out`, the folder of the earlier run")
        at, island = self.cluster, self.island
        place = [x is not None for x in (at.coordinator, at.num_processes, at.process_id)]
        together = any(place) == all(place)
        _require("coordinator", together, "goes together with `num_processes` and `process_id`")
        count = at.num_processes or 1
        _require("process_id", (at.process_id or 0) < count, f"must be < {count}", at.process_id)
        self.check_processes(count)
        gradients = self.algorithm.algorithm == "all_reduce"
        checks = self.algorithm.check_parameters
        _require("check_parameters", not (checks and gradients), "needs an exchange of parameters")
        together = (island.islands is None) == (island.island is None)
        _require("islands", together, "goes together with `island`")
        # What slow steps have, and rounds of islands do not.
        fits = {
            "algorithm": self.algorithm.algorithm in ("slowmo", "diloco"),
            "mesh": "stage" not in self.mesh.sizes,
            "fragments": self.algorithm.fragments == 1,
            "inner_state": self.algorithm.inner_state == "keep",
            "check_parameters": not checks,
            "on_nan": self.checkpoint.on_nan == "stop",
        }
        for name, does in fits.items() if island.islands is not None else ():
            _require(name, does, "does not go with `islands`", flatten_options(self)[name])

    def check_processes(self, count: int) -> None:
        """Raise `ArgumentError` for what several processes cannot do."""
        if count > 1:
            is_one = self.mesh.executor == "one_program"
            _require("executor", is_one, "host is for one process", f"{count} processes")
            _require("out", self.run.out, "must be given where several processes share it")


@dataclasses.dataclass(frozen=True)
class CompareConfig(_TrainingConfig):
    """Train with several algorithms at equal steps and seeds: a table and a figure."""

    algorithms: str = "all_reduce,local_sgd,slowmo"
    """Algorithms, separated by commas; ratios are relative to the first. Each may have settings of
    its own: sgp+overlap=1+learning-rate=0.002."""
    seeds: str | None = None
    """Seeds, separated by commas (without: --seed)."""

    @property
    def train(self) -> TrainConfig:
        """The configuration of a run, before what an algorithm and a seed set."""
        return TrainConfig(
            **{x.name: getattr(self, x.name) for x in dataclasses.fields(_TrainingConfig)}
        )


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Train in several processes of this machine: launch --processes 4 -- train --out ..."""

    processes: int
    """Processes to start on this machine."""
    restarts: int = 0
    """Start all processes again up to so many times without a newer checkpoint, when one failed."""


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Write text from the trained model of a run."""

    run: tyro.conf.Positional[Path]
    """Folder of a run with checkpoints, or of an exported model."""
    step: int | None = None
    """Step of the checkpoint to take the model from (without: the newest)."""
    prompt: str = "\n"
    """Text to continue, of which the model sees the end (default: a new line)."""
    tokens: int = 200
    """Bytes to write."""
    temperature: float = 0.8
    """1 samples from the model's distribution, less prefers likely bytes, 0 takes the likeliest."""
    top_k: int = 0
    """Sample from this many of the likeliest bytes; 0: from all."""
    seed: int = 0
    """Seed of the sampling: the same seed gives the same text."""


@dataclasses.dataclass(frozen=True)
class StatusConfig:
    """Show who takes part in a run of islands: rounds, bytes, and when they last wrote."""

    url: tyro.conf.Positional[str]
    """Run of islands, as in train --islands."""


@functools.cache
def option_types(cls: type) -> Mapping[str, tuple[str | None, Any]]:
    """Return the section (None: the class itself) and the type of all options, by their names."""
    options: dict[str, tuple[str | None, Any]] = {}
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            options |= {x: (name, kind) for x, (_, kind) in option_types(hint).items()}  # pyright: ignore
        else:
            options[name] = None, hint
    return options


def flatten_options(config: Any) -> dict[str, Any]:
    """Return the values of all options by name, as JSON has them."""
    values = {
        name: getattr(config if section is None else getattr(config, section), name)
        for name, (section, _) in option_types(type(config)).items()
    }
    return {name: str(x) if isinstance(x, Path) else x for name, x in values.items()}


def replace_options(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a configuration with other values of some options.

    Raises:
      ArgumentError: there is no such option, or the value has another type.
    """
    found = option_types(type(config))
    changes: dict[str | None, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in found:
            raise ArgumentError(name, f"no such option, got {name!r}.")
        section, hint = found[name]
        changes.setdefault(section, {})[name] = check_option(name, value, hint)
    for section, own in changes.items():
        if section is not None:
            own = {section: dataclasses.replace(getattr(config, section), **own)}
        config = dataclasses.replace(config, **own)  # pyright: ignore[reportArgumentType]
    return config


def check_option(name: str, value: Any, hint: Any) -> Any:
    """Return the value of an option; raise `ArgumentError` for another type, or one too small."""
    kinds = get_args(hint) if get_origin(hint) is types.UnionType else (hint,)
    kind: Any = kinds[0]
    if value is None and type(None) in kinds:
        return None
    value = cast("Any", value)  # pyright keeps None
    if get_origin(kind) is Literal:
        rule = f"must be one of {', '.join(get_args(kind))}"
        _require(name, value in get_args(kind), rule, repr(value))
        return value
    accepted = {float: (int, float), Path: (str, Path)}.get(kind, (kind,))
    is_right = isinstance(value, accepted) and (kind is bool) == isinstance(value, bool)
    is_right &= kind is not float or (is_right and abs(value) < math.inf)
    _require(name, is_right, f"must be {_KINDS[kind]}", repr(value))
    if name in _LEAST:
        _require(name, value >= _LEAST[name], f"must be >= {_LEAST[name]}", value)
    _require(name, value != "", "must not be empty")
    return kind(value)


def _require(name: str, is_right: object, rule: str, value: object = None) -> None:
    if not is_right:
        got = "" if value is None else f", got {value}"
        raise ArgumentError(name, f"`{name}` {rule}{got}.")


def unused_options(config: Any) -> dict[str, str]:
    """Map options that have no effect beside the others of a command to the reason."""
    if isinstance(config, SampleConfig):
        names = () if config.temperature else ("top_k", "seed")
        return dict.fromkeys(names, "with --temperature 0")
    algorithms, reasons = [config.algorithm.algorithm], {}
    if isinstance(config, CompareConfig):
        algorithms = [name.partition("+")[0] for name in config.algorithms.split(",")]
        reasons["algorithm"] = "beside --algorithms"
        if config.seeds is not None:
            reasons["seed"] = "beside --seeds"
    elif config.island.islands is None:
        reasons["quorum"] = "without --islands"
    if isinstance(config, TrainConfig) and not config.checkpoint.resume:
        reasons["fallback"] = "without --resume"
    if config.mesh.num_replicas != config.mesh.replicas:
        reasons["replicas"] = f"beside the replicas of `mesh`, {config.mesh.mesh}"
    if "stage" not in config.mesh.sizes:
        reasons["schedule"] = "without stages in --mesh"
    users = {name: {*text.split()} for name, text in _USERS.items()}
    unread = [name for name in users if users[name].isdisjoint(algorithms)]
    return reasons | dict.fromkeys(unread, f"with {', '.join(algorithms)}")


def warn_unused(config: Any, words: Sequence[str], **more: str) -> None:
    """Warn of options among the words of a command that have no effect.

    Args:
      config: what the words, a file and defaults make.
      words: the words.
      **more: further options without effect, and the reasons.
    """
    said = {word.partition("=")[0].replace("_", "-") for word in words}
    for name, reason in {**unused_options(config), **more}.items():
        option = f"--{name.replace('_', '-')}"
        if option in said:
            warn_user(f"{option} has no effect {reason}.")


_TYRO = (tyro.conf.OmitArgPrefixes, tyro.conf.PositionalMetavarFromFieldName)
# How a run was started: the next one starts in its own way.
_START_OPTIONS = (
    "config", "out", "resume", "fallback", "overwrite", "dry_run", "coordinator",
    "coordinator_bind", "num_processes", "process_id",
)  # fmt: skip
# Arguments of the library, and the options that give them.
_OPTIONS = {
    "batch_size": "batch", "bucket_bytes": "bucket_mib", "num_nodes": "replicas",
    "num_stages": "mesh", "num_microbatches": "microbatches", "num_chunks": "chunks",
    "rules": "mesh", "num_heads": "preset", "url": "islands", "name": "island",
    "outer_optimizer": "algorithm", "num_replicas": "replicas",
}  # fmt: skip
# Names of other programs for these options.
_SYNONYMS = {"lr": "learning_rate", "wd": "weight_decay", "epochs": "steps", "iterations": "steps"}
_COMMANDS = {
    "train": TrainConfig, "compare": CompareConfig, "launch": LaunchConfig, "sample": SampleConfig,
}  # fmt: skip
_NAMES = {name for cls in _COMMANDS.values() for name in option_types(cls)}
# The options that presets set.
_PRESET_OPTIONS = {name for values in PRESETS.values() for name in values}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")  # of JSON
_WORDS = {"true": True, "True": True, "false": False, "False": False}
_WORDS |= dict.fromkeys(("", "~", "null", "Null"))


@contextlib.contextmanager
def argument_errors(**options: str) -> Iterator[None]:
    """Run the block, and turn a `ValueError` about an argument into a `CommandError`.

    Use it only for set-up: a `ValueError` during training is a bug and keeps its traceback.

    Args:
      **options: maps an argument to its option, where their names differ.
    """
    try:
        yield
    except ArgumentError as error:
        name = (_OPTIONS | options).get(error.argument, error.argument)
        option = f"--{name.replace('_', '-')}: " if name in _NAMES else ""
        raise CommandError(f"{option}{error}") from error
    except ValueError as error:
        raise CommandError(str(error)) from error


def parse_config(
    cls: type[Config], program: str, words: Sequence[str], default: Any = None
) -> Config:
    """Return the configuration that words describe, with other values from `default`.

    Raises:
      CommandError: an option is unknown, lacks its value, or has a wrong one.
      SystemExit: the words ask for help, which is printed.
    """
    said = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(said):
            config = tyro.cli(cls, prog=program, args=words, config=_TYRO, **options)
    except SystemExit as end:
        if not end.code:
            raise
        # The first paragraph of tyro's box, without its frame.
        rows = [line.strip("│| ") for line in said.getvalue().splitlines()[1:]]
        paragraphs = re.split("(?:^|\n)[-─]{3,}", "\n".join(rows))
        text = " ".join(next(filter(str.strip, paragraphs)).split())
        text = _describe_words(cls, words, text) or text.rstrip(".")
        raise CommandError(f"{text}; see {program} --help") from None
    with argument_errors():
        for name, value in flatten_options(config).items():
            check_option(name, value, option_types(cls)[name][1])
    return config


def _hidden(cls: type) -> set[str]:
    """Return the options that only a file sets."""
    hints = get_type_hints(cls, include_extras=True)
    inner = [x for x in hints.values() if dataclasses.is_dataclass(x)]
    own = {name for name, x in hints.items() if Hidden in getattr(x, "__metadata__", ())}
    return own.union(*(_hidden(cast("type", x)) for x in inner))


def _nearest_option(name: str, names: Collection[str]) -> str | None:
    """Return the option that may be meant by a name that is none."""
    name = (_OPTIONS | _SYNONYMS).get(name, name)
    if name in names:
        return name
    longer = sorted(x for x in names if x.startswith(name))
    return next(iter(longer or difflib.get_close_matches(name, names, 1)), None)


def _describe_words(cls: type, words: Sequence[str], refusal: str) -> str | None:
    """Return what is wrong with words that tyro refused: no option, or a value too many."""
    kinds, hidden = {name: kind for name, (_, kind) in option_types(cls).items()}, _hidden(cls)
    flags = {f"no_{name}" for name, kind in kinds.items() if kind is bool}
    known = kinds.keys() - hidden | flags | {"h", "help"}
    for word in words:
        shown = word.partition("=")[0]
        name = shown.lstrip("-").replace("-", "_")
        if not re.fullmatch("--?[A-Za-z][A-Za-z0-9_-]*", shown) or name in known:
            continue
        owner = next((x for x, other in _COMMANDS.items() if name in option_types(other)), None)
        near, hint = _nearest_option(name, kinds), ""
        if owner and name not in kinds:
            hint = f"; it is one of {owner}{', after --' * (cls is LaunchConfig)}"
        elif near in hidden:
            hint = f"; `{near}` is set in a file, --config FILE"
        elif near:
            hint = f"; did you mean --{near.replace('_', '-')}?"
        return f"no such option: {shown}{hint}"
    extra = refusal.removeprefix("Unrecognized options: ").split(", ")[0]
    if extra == refusal or extra not in words:
        return None
    before = [word for word in words[: words.index(extra)] if word.startswith("--")]
    if not before:
        return f"{extra} belongs to no option"
    kind = kinds.get(before[-1][2:].replace("-", "_"))
    return f"{before[-1]} takes {'no' if kind is bool else 'one'} value: {extra} is one too many"


def read_config(cls: type[Config], program: str, words: Sequence[str]) -> Config:
    """Return the configuration of `train` or `compare`, with its file and its preset.

    Options of the words replace those of `--config`, these what a resumed run had, and these those
    of the preset. If the words have another preset than the config.json of a run, what is default
    there is default here.

    Raises:
      CommandError: see `parse_config`, or values do not go together, or the file is wrong.
      SystemExit: the words ask for help, which is printed.
    """
    default: Any = cls()
    config: Any = parse_config(cls, program, words, default)
    values: dict[str, Any] = {}
    if isinstance(config, TrainConfig) and config.checkpoint.resume and config.run.out is not None:
        values |= _options_of_run(config.run.out / "config.json")
    if config.run.config is not None:
        values |= read_file(cls, config.run.config)
    with argument_errors():
        config = parse_config(cls, program, words, replace_options(default, values))
        preset = config.model.preset
        values = {**PRESETS[preset], **_without_other_defaults(values, preset)}
        config = parse_config(cls, program, words, replace_options(default, values))
        config.check()
    return config


def _without_other_defaults(values: dict[str, Any], preset: str) -> dict[str, Any]:
    """Return the values of a file without defaults of its preset, if that is not `preset`.

    Only config.json of a run has all options that presets set. In another file all are meant.
    """
    own = values.get("preset", preset)
    if own == preset or not values.keys() >= _PRESET_OPTIONS:
        return values
    defaults = flatten_options(TrainConfig()) | PRESETS[own]
    return {
        name: x for name, x in values.items() if name not in _PRESET_OPTIONS or x != defaults[name]
    }


def _options_of_run(path: Path) -> dict[str, Any]:
    """Return the values with which a run goes on: its own, and its schedule as it was."""
    if not path.exists():
        return {}
    values = read_file(TrainConfig, path)
    saved = replace_options(TrainConfig(), values)
    return values | {"warmup": saved.warmup_steps, "schedule_steps": saved.schedule_length}


def to_file(config: Any) -> dict[str, Any]:
    """Return the values for config.json, without how this run was started."""
    return {
        name: value for name, value in flatten_options(config).items() if name not in _START_OPTIONS
    }


def read_file(cls: type, path: Path) -> dict[str, Any]:
    """Return the values in a YAML or JSON file, by the names of options.

    Options of `train` that the command lacks are left out.

    Raises:
      CommandError: the file cannot be read, holds anything but names and plain values, a name twice
        or one that is no option, or a value has another type than the option.
    """
    options, values = {**option_types(TrainConfig), **option_types(cls)}, {}
    try:
        text = path.read_text(encoding="utf-8-sig")
        for key, value in _pairs_of_json(text) if path.suffix == ".json" else _pairs_of_yaml(text):
            name = key.replace("-", "_")
            if name not in options or name == "config":
                near = _nearest_option(name, options)
                hint = f"; did you mean {near}?" if near and near != name else ""
                raise ValueError(f"{key} is no option{hint}; see jaxslowmo train --help")
            if name in values:
                raise ValueError(f"{key} stands there twice")
            values[name] = None if value is None else check_option(name, value, options[name][1])
    except OSError as error:
        raise CommandError(f"--config: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        why = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CommandError(f"--config {path}: {why}") from None
    return {name: x for name, x in values.items() if name in option_types(cls) and x is not None}


def _pairs_of_json(text: str) -> list[tuple[str, Any]]:
    pairs = json.loads(text, object_pairs_hook=list)
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError("must be a mapping from names of options to values")
    return pairs


def _pairs_of_yaml(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the pairs of one flat mapping; a plain scalar is what JSON makes of it, or a text."""
    import yaml  # only for such a file

    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"is no YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode | None):  # None: an empty file
        raise ValueError("must be a mapping from names of options to values")
    for key, value in root.value if root else ():
        if not (isinstance(key, yaml.ScalarNode) and isinstance(value, yaml.ScalarNode)):
            raise ValueError("must hold plain values, not lists or groups")
        yield key.value, value.value if value.style else parse_scalar(value.value)


def parse_scalar(text: str) -> Any:
    """Return the number, truth value or None that a text stands for, else the text."""
    if text in _WORDS:
        return _WORDS[text]
    return json.loads(text) if _NUMBER.fullmatch(text) else text
