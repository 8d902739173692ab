"""What a run trains with: devices, model, text, algorithm, and the training step of them."""

import contextlib
import dataclasses
import functools
import logging
import math
import os
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

import jaxslowmo as js
from jaxslowmo.data import Corpus, TextBatches, split_corpus, validation_batches
from jaxslowmo.models import (
    GPTLayers,
    gpt_layers,
    gpt_loss_fn,
    gpt_param_specs,
    gpt_preset,
    gpt_rules,
    gpt_types,
    init_gpt,
)
from jaxslowmo.topology import Mixing, make_graph, self_weighted, uniform_mixing
from jaxslowmo.train import addressable_shard_numbers
from jaxslowmo.tree import leaf_names

from .._support.checks import ArgumentError
from ._config import MODEL_AXES, AlgorithmConfig, TrainConfig, argument_errors
from ._errors import CommandError, island_errors
from ._processes import ALONE, Cluster

# Each CPU device has its own thread pool and copy of the state; more devices only cost memory.
MAX_CPU_DEVICES = 64
# CPU devices share the cores of the host, so one may enter a collective late; by default XLA aborts
# the process after 40 seconds.
_PATIENCE = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
)
# Between processes on CPU, separate all-reduces overlap with the computation, and one combined
# all-reduce would not. Only the compiler for CPUs has this pass.
_NO_COMBINING = "--xla_disable_hlo_passes=cpu-all-reduce-combiner"
_EVAL_BYTES_PER_BATCH = 8192
AnyMesh = Mesh | js.mesh.VirtualMesh


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices on which the replicas run.

    Attributes:
      mesh: mesh of the training step, with the axes "replica" and those inside a replica.
      description: the devices in words.
      is_cpu: whether the devices are CPU devices, which share the cores of the host.
    """

    mesh: AnyMesh
    description: str
    is_cpu: bool

    @property
    def is_virtual(self) -> bool:
        """True if the replicas are `vmap`ped on one device, so that nothing is sent."""
        return not isinstance(self.mesh, Mesh)


def choose_devices(config: TrainConfig, cluster: Cluster = ALONE) -> Devices:
    """Return the devices for the replicas; call it before anything else touches a device.

    "devices" is one device per replica (times those inside it), on CPU as many as are needed;
    "virtual" is all replicas on one device; "auto" is devices where there are enough of them, else
    virtual. With several processes each provides the same number of devices, in order of processes;
    they belong to whole replicas, or to a part of one.

    Raises:
      CommandError: there are fewer devices than "devices" needs, they cannot be divided evenly
        among the processes, or the run needs other devices.
    """
    asked, sizes, count = config.mesh, config.mesh.sizes, cluster.count
    replicas, each = asked.num_replicas, asked.devices_per_replica
    if replicas % count and (count % replicas or each % (count // replicas)):
        raise CommandError(
            f"--replicas: {count} processes must divide the replicas, or replicas the processes "
            f"and processes the devices of a replica; got {replicas} replicas of {each} devices"
        )
    set_cpu_devices(config, count)
    devices, needed = jax.devices(), replicas * each
    is_cpu, is_short = devices[0].platform == "cpu", len(devices) < needed
    kind = "CPU device" if is_cpu else devices[0].device_kind
    if config.model.attention == "cudnn" and devices[0].platform not in ("gpu", "cuda"):
        raise CommandError(f"`attention: cudnn` needs a GPU of NVIDIA, found {kind}")
    can_be_virtual = count == 1 and not asked.model_axes
    if asked.execution == "virtual" and not can_be_virtual:
        raise CommandError("--execution virtual needs one process, and whole models in --mesh")
    if can_be_virtual and (
        asked.execution == "virtual" or (asked.execution == "auto" and is_short)
    ):
        inside = f" of {each} virtual devices" if each > 1 else ""
        description = f"{replicas} virtual replicas{inside} on one {kind}"
        return Devices(js.virtual_mesh(sizes), description, is_cpu)
    if is_short:
        raise CommandError(
            f"--mesh {','.join(f'{x}={n}' for x, n in sizes.items())} takes {needed} devices, "
            f"found {len(devices)} ({kind}): use fewer{', or virtual ones' * can_be_virtual}"
        )
    hosts = f" of {count} processes" if count > 1 else ""
    named = ", ".join(f"{name}={n}" for name, n in asked.model_axes.items())
    inside = f" of {each} devices{f' ({named})' * bool(named)}" if each > 1 else ""
    description = f"{replicas} replicas{inside} on {needed} of {len(devices)} {kind}s{hosts}"
    if count > 1:  # equally many of every process, in their order
        by_process = [[d for d in devices if d.process_index == i] for i in range(count)]
        devices = [device for local in by_process for device in local[: needed // count]]
    return Devices(js.make_mesh(sizes, devices=devices[:needed]), description, is_cpu)


def set_cpu_devices(config: TrainConfig, num_processes: int | None) -> None:
    """Set the number of CPU devices that a process needs, in case jax runs on CPU.

    It changes nothing if the user chose a number or jax has started. Call it before processes are
    joined, too, since that fixes the devices.

    Args:
      config: configuration of the run.
      num_processes: number of processes; None, one device each, if only the launcher knows it.
    """
    needed = math.prod(config.mesh.sizes.values())
    count = 1 if num_processes is None else max(1, needed // num_processes)
    if config.mesh.execution == "virtual" or count > MAX_CPU_DEVICES:
        return
    flags = os.environ.get("XLA_FLAGS", "")
    defaults = _PATIENCE if num_processes == 1 else (*_PATIENCE, _NO_COMBINING)
    new = [flag for flag in defaults if flag.partition("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *new]).strip()
    chosen = getattr(jax.config, "jax_num_cpu_devices", -1) > 0
    if not chosen and "xla_force_host_platform_device_count" not in flags:
        with contextlib.suppress(RuntimeError):  # jax has started: the number is fixed
            jax.config.update("jax_num_cpu_devices", count)


class Model:
    """The model of a run, and the placement of its parameters inside a replica.

    Args:
      config: configuration of the run.
      mesh: mesh of the training step.

    Attributes:
      config: shape of the model.
      loss_fn: loss of parameters and the windows of one replica.
      schedule, parts: that of the pipeline, and the layers of each stage; None without stages.

    Raises:
      ValueError: the sizes of the mesh do not fit those of the model.
    """

    def __init__(self, config: TrainConfig, mesh: AnyMesh) -> None:
        own, axes = config.model, config.mesh.model_axes
        shape = gpt_preset(own.preset, dtype=own.dtype, attention=own.attention)
        self.config = shape = dataclasses.replace(shape, tied=own.tied)
        self.schedule, self.parts, self._mesh = None, None, mesh
        is_split = bool({"fsdp", "tensor"} & set(axes))
        rules = gpt_rules(mesh) if is_split else None
        self._specs = gpt_param_specs(shape, mesh, rules) if is_split else None
        self._rules = rules
        if "stage" not in axes:
            self.loss_fn: Any = gpt_loss_fn(shape, rules)
            return
        if own.dtype == "float16":
            raise CommandError("--dtype float16 does not go with stages, whose gradients vanish")
        kind, chunks = config.mesh.schedule, config.mesh.chunks
        # With one chunk the interleaved schedule would be one_f_one_b.
        chunks = 2 if kind == "interleaved" and chunks is None else chunks
        schedule = js.schedules.by_name(kind, axes["stage"], config.num_microbatches, chunks)
        layers = self._layers
        types = layers.split(gpt_types(shape))
        costs = js.pipeline.count_layer_params(types)
        parts = js.partition_by_cost(costs, schedule.num_stages, schedule.num_chunks)
        self.schedule, self.parts = schedule, parts
        self.loss_fn = js.pipelined(
            js.LayeredModel(layers.layers, layers.loss, tied=layers.tied),
            types,
            schedule,
            parts=parts,
            mesh=cast("Mesh", mesh),
            executor=config.mesh.executor,
            data_axes=("fsdp",) if "fsdp" in axes else (),
            param_specs=None if self._specs is None else layers.split(self._specs),
        )

    @functools.cached_property
    def _layers(self) -> GPTLayers:
        return gpt_layers(self.config, self._rules)

    @property
    def is_whole(self) -> bool:
        """True if every device has all parameters."""
        return self._specs is None and self.schedule is None

    def join(self, tree: Any) -> Any:
        """Return a tree like that of `init_gpt`, from the one that `step.consensus` returns."""
        return tree if self.schedule is None else self._layers.join(tree)

    def other_names(self) -> dict[str, str]:
        """Map parameters to their names in runs with stages if this is without, and the reverse.

        With stages parameters have the names of layers, without them those of flax's modules.
        """
        types = gpt_types(self.config)
        split = self._layers.split(jax.tree.structure(types).unflatten(leaf_names(types)))
        pairs = [*zip(leaf_names(split), jax.tree.leaves(split), strict=True)]
        if self.schedule is not None:
            return dict(pairs)
        # A tied table is in two layers, and the embedding's copy comes first.
        return {module: layer for layer, module in reversed(pairs)}

    def init(self, seed: int) -> Any:
        """Return one copy of the initial parameters, which depend on the seed, for `step.init`."""
        params = init_gpt(self.config, seed)
        if self.is_whole:
            return params
        params = jax.tree.map(np.asarray, params)  # so that no device holds more than its part
        if self.schedule is not None:
            return self._layers.split(params)

        def place(x: Any, spec: Any) -> jax.Array:
            sharding = NamedSharding(cast("Mesh", self._mesh), spec)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(place, params, self._specs)


class Text(Iterator[np.ndarray]):
    """The text that a run reads, and its batches; each process makes the rows of its own devices.

    Every process reads all files, to make the same division and leave out the same duplicates.

    Args:
      config: configuration of the run.
      corpus: corpus that `read_corpus` returned.
      mesh: mesh of the training step.

    Attributes:
      position: index of the next batch; it counts loaded batches, also those not trained on yet.
      validation: held-out windows, uint8 (batches, windows, context_length + 1).
      fingerprint: fingerprint of the corpus.
      description: the corpus in words.

    Raises:
      ValueError: there is not enough text.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, mesh: AnyMesh) -> None:
        context, sizes = gpt_preset(config.model.preset).context_length, config.mesh.sizes
        # A number of windows that microbatches and devices divide evenly.
        even = config.num_microbatches * sizes.get("fsdp", 1)
        windows = even * math.ceil(max(1, _EVAL_BYTES_PER_BATCH // context) / even)
        split = split_corpus(corpus, sizes["replica"])
        options: Any = {"batch_size": config.data.batch, "window": context + 1}
        TextBatches(split.shares, seed=0, **options)  # raises unless every share holds a batch
        self._options = options
        self._replicas = addressable_shard_numbers(mesh, mesh.axis_names[:1])
        # Copies, so that the text of other replicas can be freed.
        self._shares = [split.shares[replica].copy() for replica in self._replicas]
        self.validation = validation_batches(
            split.validation,
            num_batches=config.run.eval_batches,
            batch_size=windows,
            window=context + 1,
        )
        self.fingerprint = corpus.fingerprint
        skipped = f", {len(corpus.skipped)} skipped" if corpus.skipped else ""
        self.description = (
            f"{corpus.source}: {len(corpus.documents)} files{skipped}, "
            f"{corpus.num_bytes / 1e6:.1f} MB, {split.validation.size / 1e6:.2f} MB held out"
        )
        # Processes may share a replica: each trains on the rows of its own devices.
        # Axes that split the model do not split batches here; the program may do so.
        axes = tuple(name for name in mesh.axis_names if name not in MODEL_AXES)
        devices = math.prod(mesh.shape[name] for name in axes[1:])
        begins = [
            self._replicas.index(part // devices) * devices + part % devices
            for part in addressable_shard_numbers(mesh, axes)
        ]
        batch = config.data.batch
        rows = np.arange(batch * len(self._replicas)).reshape(-1, batch // devices)
        self._rows = rows[begins].ravel()

    def begin(self, config: TrainConfig) -> None:
        """Start at the first batch of the seed of a configuration."""
        seed, own = config.data_seed, self._replicas
        self._batches = TextBatches(self._shares, seed=seed, replicas=own, **self._options)
        self.position = 0

    def batch(self, index: int) -> np.ndarray:
        """Return the rows of this process in batch `index`: uint8 (rows, window), replica-major."""
        return self._batches.batch(index)[self._rows]

    def get_state(self) -> int:
        """Return the position."""
        return self.position

    def __next__(self) -> np.ndarray:
        batch = self.batch(self.position)
        self.position += 1
        return batch


# Norm weights stay in float32: they multiply statistics that are float32 anyway.
_NORMS = ("norm", "blocks/*/norm_*")
_MOST_LOSS_SCALE = 2**24  # the loss scale stops growing there
_CODECS = ("bfloat16", "float16", "fp8", "int8", "int4")


class Look(NamedTuple):
    """How an algorithm is drawn, and which exchanges, other than of gradients, describe it."""

    colour: str
    marker: str
    exchanges: tuple[str, ...] = ()


_AVERAGE = "average every {sync_every}"
_SLOW = "slow step every {slow_every}"
_GOSSIP = "gossip over {graph}"
LOOKS = {
    "all_reduce": Look("black", "o"),
    "local_sgd": Look("blue", "s", (_AVERAGE,)),
    "sgp": Look("pink", "v", (_GOSSIP,)),
    "slowmo": Look("vermilion", "D", (_AVERAGE, _SLOW)),
    "slowmo_sgp": Look("orange", "P", (_GOSSIP, _SLOW)),
    "diloco": Look("green", "^", (_SLOW,)),
}


def describe_exchanges(algorithms: Collection[str], config: AlgorithmConfig) -> list[str]:
    """Return in words what these algorithms exchange, and when."""
    used = {exchange for name in algorithms for exchange in LOOKS[name].exchanges}
    return [x.format_map(vars(config)) for x in (_AVERAGE, _SLOW, _GOSSIP) if x in used]


def parse_codec(text: str) -> js.codecs.Codec | None:
    """Return the codec of a text like "int4" or "top_k:0.02"; None for "none"."""
    name, colon, fraction = text.partition(":")
    if name in ("none", *_CODECS) and not colon:
        return None if name == "none" else getattr(js.codecs, name)(error_feedback=True)
    if name == "top_k" and _is_number(fraction):
        return js.codecs.top_k(float(fraction))
    rule = f"one of none, {', '.join(_CODECS)}, or top_k:FRACTION such as top_k:0.02"
    raise ArgumentError("codec", f"`codec` must be {rule}, got {text}.")


def parse_mixing(text: str) -> Mixing:
    """Return the mixing that a text like "uniform" or "self_weighted:0.7" names."""
    name, colon, share = text.partition(":")
    if name == "uniform" and not colon:
        return uniform_mixing()
    if name == "self_weighted" and _is_number(share):
        return self_weighted(float(share))
    rule = "uniform, or self_weighted:SHARE such as self_weighted:0.7"
    raise ArgumentError("mixing", f"`mixing` must be {rule}, got {text}.")


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def _slow_options(config: TrainConfig, codec: js.codecs.Codec | None) -> dict[str, Any]:
    """Return the arguments that slow steps share; with sparse codecs their state is whole."""
    own = config.algorithm
    averages = own.exact_average or own.algorithm == "diloco"
    shards = own.shard_state and averages and not (codec and codec.is_sparse)
    return {
        "sync_every": own.slow_every,
        "shard_state": shards,
        "codec": codec if averages else None,
        **_fragment_options(own),
    }


def _fragment_options(config: AlgorithmConfig) -> dict[str, Any]:
    return {x: getattr(config, x) for x in ("fragments", "delay", "merge", "inner_state")}


def _local_sgd(config: TrainConfig, **options: Any) -> js.ParameterTransform:
    return js.local_sgd("replica", sync_every=config.algorithm.sync_every, **options)


def _sgp(config: TrainConfig, codec: js.codecs.Codec | None, local: Any) -> Any:
    own = config.algorithm
    with argument_errors(num_nodes="replicas", name="graph"):
        return js.sgp(
            "replica",
            # No function that closes over `config`, in which processes differ.
            graph=functools.partial(make_graph, own.graph, peers_per_step=own.peers_per_step),
            mixing=parse_mixing(own.mixing),
            overlap=own.overlap,
            codec=cast("js.codecs.Half | None", codec),
            **local,
        )


def _sync(config: TrainConfig, schedule: optax.Schedule) -> js.ParameterTransform | None:
    """Return the transform of parameters; None for the algorithm that averages gradients."""
    own = config.algorithm
    local: dict[str, Any] = {}
    if "device" in config.mesh.sizes:
        local = {"local_axis_name": "device"}
    codec, kind = parse_codec(own.codec), own.algorithm
    if config.island.islands is not None:
        # The codec is that of rounds: what replicas of an island send each other stays whole.
        base = _local_sgd(config, **local) if kind == "slowmo" else None
        return js.islands.transform(base, codec)
    if kind == "all_reduce":
        return None
    if kind == "local_sgd":
        return _local_sgd(config, codec=codec, **local, **_fragment_options(own))
    if kind == "sgp":
        return _sgp(config, codec, local)
    if kind == "diloco":
        with argument_errors(sync_every="slow_every"):
            return js.diloco(
                "replica",
                outer_optimizer=_outer_optimizer(own),
                **local,
                **_slow_options(config, codec),
            )
    if kind == "slowmo":
        base = _local_sgd(config, codec=codec, **local)
    else:
        base = _sgp(config, codec, local)
    with argument_errors(sync_every="slow_every", momentum="slow_momentum"):
        return js.slowmo(
            "replica",
            base=base,
            momentum=own.slow_momentum,
            slow_learning_rate=own.slow_learning_rate,
            learning_rate=schedule,
            exact_average=own.exact_average,
            nesterov=own.nesterov,
            **local,
            **_slow_options(config, codec),
        )


def _outer_optimizer(config: AlgorithmConfig) -> optax.GradientTransformation:
    return js.algorithms.outer_nesterov(config.outer_learning_rate, config.outer_momentum)


def make_step(config: TrainConfig, loss_fn: Any, mesh: Any, **options: Any) -> js.train.TrainStep:
    """Return the training step of a configuration.

    Args:
      config: configuration of the run.
      loss_fn: loss of parameters and the windows of one replica.
      mesh: mesh with the axis "replica", and those inside a replica.
      **options: further arguments of `js.make_train_step`.

    Raises:
      CommandError: the library refuses an argument.
    """
    own, schedule, gradients = config.algorithm, learning_rate_schedule(config), None
    with argument_errors():
        sync = _sync(config, schedule)
        if own.algorithm == "all_reduce":
            size = round(own.bucket_mib * 2**20)
            axes = ("replica", "device") if "device" in config.mesh.sizes else "replica"
            gradients = js.all_reduce_gradients(
                axes, bucket_bytes=size, first_bucket_bytes=min(size, 2**20)
            )
        if own.check_parameters and sync is not None:
            sync = js.only_finite(sync)
        dtype, policy = config.model.dtype, None
        # A buffer of a stage holds norms and other weights, which names do not distinguish. The
        # layers compute in this dtype anyway: the policy only casts what they would cast.
        if dtype != "float32" and "stage" not in config.mesh.sizes:
            policy = js.gradients.Policy(dtype, keep=_NORMS)
        return js.make_train_step(
            loss_fn,
            _optimizer(config, schedule),
            sync=sync,
            gradients=gradients,
            accumulate=config.data.accumulate,
            mesh=mesh,
            mode=config.mesh.mode,
            policy=policy,
            **options,
        )


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """Return a linear warm-up to the peak, then a cosine down to a tenth of it, or a constant."""
    peak, warmup = config.optimizer.learning_rate, config.warmup_steps
    if config.optimizer.rate_schedule == "cosine":
        length = config.schedule_length
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, length, 0.1 * peak)
    if not warmup:  # without steps to rise in, optax's warm-up stays at its first value, 0
        return optax.constant_schedule(peak)
    return optax.schedules.warmup_constant_schedule(0.0, peak, warmup)


def past_schedule(config: TrainConfig, step: int) -> tuple[str, ...]:
    """Return a note if a run that resumes at `step` trains past the end of its schedule."""
    end, steps = config.schedule_length, config.run.steps
    if config.optimizer.rate_schedule != "cosine" or not max(end, step) < steps:
        return ()
    rate = np.asarray(learning_rate_schedule(config)(end)).item()
    stretch = f"`schedule_steps: {steps}` in a --config stretches it."
    return (f"The schedule ends at step {end}; then the rate stays {rate:.3g}. {stretch}",)


def _optimizer(config: TrainConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    own = config.optimizer
    if own.optimizer == "adamw":
        inner = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=own.weight_decay)
    else:
        inner = optax.sgd(rate, momentum=0.9)
    # Gradients are clipped after their average (all_reduce) and before the optimizer. The norm is
    # that of the whole model, also where the compiler shards it over axes inside a replica.
    if own.clip:
        inner = js.chain(js.clip_by_global_norm(own.clip), inner)
    if config.model.dtype != "float16" or not config.model.loss_scale:
        return inner
    return js.dynamic_loss_scale(
        inner,
        initial=config.model.loss_scale,
        growth_interval=config.model.loss_scale_interval,
        max_scale=_MOST_LOSS_SCALE,
    )


def join_islands(config: TrainConfig) -> "js.islands.Island | None":
    """Join the run of `--islands`, whose rounds are the algorithm's slow steps; None without it.

    Raises:
      CommandError: the library refuses an argument, the store does not answer, or holds another
        run.

    Communication: two small requests to the store.
    """
    own, island = config.algorithm, config.island
    if island.islands is None or island.island is None:
        return None
    logger = logging.getLogger("jaxslowmo.islands")
    if logging.lastResort is not None:  # its lines on stderr, as they are, and once
        logger.addHandler(logging.lastResort)
        logger.propagate = False
    with island_errors(), argument_errors(sync_every="slow_every", momentum="slow_momentum"):
        optimizer = _outer_optimizer(own)
        if own.algorithm == "slowmo":
            # With a rate of 1, since islands are at different points of the schedule.
            optimizer = js.slow_momentum(
                own.slow_momentum, own.slow_learning_rate, nesterov=own.nesterov
            )
        return js.islands.join(
            island.islands,
            name=island.island,
            outer_optimizer=optimizer,
            sync_every=own.slow_every,
            delay=own.delay,
            quorum=island.quorum,
            deadline_seconds=island.deadline_seconds,
            codec=parse_codec(own.codec),
            late=island.late,
            merge=own.merge,
        )
