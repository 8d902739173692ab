"""How a run is divided: which devices run the replicas, and what each replica reads."""

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jaxslowmo as js
from jaxslowmo.data import Corpus, TextBatches, split_corpus, validation_batches
from jaxslowmo.models import gpt_preset
from jaxslowmo.train.batches import own_parts

from .._errors import CommandError, usage_errors
from ..config._mesh import MODEL_AXES
from ..config._training import TrainConfig
from ..processes._peers import ALONE, Cluster

# Each CPU device is a thread pool and a copy of everything; more of them help nobody.
MAX_CPU_DEVICES = 64
# The devices of a laptop share its cores, so one may come late to a collective; by default the
# process aborts after 40 seconds of that.
_PATIENCE = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
)
# Between processes on CPU, all-reduces that stay apart travel beside the computation. A pass
# of the compiler for CPUs alone: other platforms do not know it.
_APART = "--xla_disable_hlo_passes=cpu-all-reduce-combiner"
_EVAL_BYTES_PER_BATCH = 8192


@dataclasses.dataclass(frozen=True)
class RunDevices:
    """Where the replicas run.

    Attributes:
      mesh: for the training step, with the axes "replica" and, for two levels, "device".
      description: the same in words.
      is_virtual: replicas are `vmap`ped on one device and nothing is sent.
      is_cpu: the devices are parts of the host.
    """

    mesh: jax.sharding.Mesh | js.VirtualMesh
    description: str
    is_virtual: bool
    is_cpu: bool


def choose_mesh(config: TrainConfig, cluster: Cluster = ALONE) -> RunDevices:
    """Devices for the replicas: call it before anything else touches a device.

    "devices" is one device per replica (times `devices_per_replica`), on CPU as many as are
    needed; "virtual" is all replicas on one device; "auto" is devices where there are enough of
    them, else virtual. With several processes each gives as many devices, in order of processes:
    of whole replicas, or of a part of one.

    Raises:
      CommandError: if there are fewer devices than "devices" needs, they cannot be divided evenly
        among the processes, or the run cannot have several.
    """
    if cluster.count > 1:
        with usage_errors():
            config.mesh.check_processes(cluster.count)
    _check_division(config, cluster.count)
    if cluster.count > 1 and config.execution == "virtual":
        raise CommandError("--execution virtual is for one process, and devices for several")
    axes, each = config.axes, config.devices_of_a_replica
    needed = config.replicas * each
    ask_for_devices(config, cluster.count)
    devices = jax.devices()
    is_cpu = devices[0].platform == "cpu"
    kind = "CPU device" if is_cpu else devices[0].device_kind
    is_short, shares_model = len(devices) < needed, bool(config.model_axes)
    if config.execution == "virtual" and shares_model:
        raise CommandError(
            f"--execution virtual has no devices inside a replica to share the model of --mesh "
            f"{config.mesh.mesh} between"
        )
    if config.execution == "virtual" or (
        config.execution == "auto" and is_short and cluster.count == 1 and not shares_model
    ):
        inside = "" if len(axes) == 1 else f" of {each} virtual devices"
        description = f"{config.replicas} virtual replicas{inside} on one {kind}"
        return RunDevices(js.virtual_mesh(axes), description, is_virtual=True, is_cpu=is_cpu)
    if is_short:
        asked = (
            f"--replicas {config.replicas} with --devices-per-replica {config.devices_per_replica} "
            if config.mesh.mesh is None
            else f"--mesh {config.mesh.mesh} "
        )
        way_out = "use fewer" if shares_model else "use fewer, or --execution virtual"
        raise CommandError(
            f"{asked.strip()} need{'s' * (config.mesh.mesh is not None)} {needed} devices, found "
            f"{len(devices)} ({kind}): {way_out}"
        )
    named = ", ".join(f"{name}={n}" for name, n in config.model_axes.items())
    inside = "" if len(axes) == 1 else f" of {each} devices" + (f" ({named})" if named else "")
    if cluster.count > 1:
        devices = _even_share(devices, needed // cluster.count)
    hosts = f" of {cluster.count} processes" if cluster.count > 1 else ""
    where = f"{needed} of {len(jax.devices())} {kind}s{hosts}"
    mesh = js.make_mesh(axes, devices=devices[:needed])
    description = f"{config.replicas} replicas{inside} on {where}"
    return RunDevices(mesh, description, is_virtual=False, is_cpu=is_cpu)


def _check_division(config: TrainConfig, processes: int) -> None:
    """Whole replicas for every process, or equal parts of one."""
    replicas, each = config.replicas, config.devices_of_a_replica
    if replicas % processes == 0:
        return
    if processes % replicas:
        raise CommandError(
            f"--replicas must be a multiple of the number of processes, {processes}, or divide it, "
            f"got {replicas}"
        )
    if each % (processes // replicas):
        what = "--devices-per-replica" if config.mesh.mesh is None else "the devices of a replica"
        raise CommandError(
            f"{what} must be a multiple of {processes // replicas}: with --replicas {replicas} and "
            f"{processes} processes each replica spans as many; got {each}"
        )


def ask_for_devices(config: TrainConfig, num_processes: int | None) -> None:
    """As many CPU devices as a process needs, if that is where they will be.

    Before processes are joined, too, which fixes the devices; where only the launcher knows the
    number of processes, None, one for each.
    """
    needed = config.replicas * config.devices_of_a_replica
    own = 1 if num_processes is None else max(1, needed // num_processes)
    if config.execution != "virtual" and own <= MAX_CPU_DEVICES:
        _ask_for_cpu_devices(own, alone=num_processes == 1)


def _even_share(devices: list[Any], each: int) -> list[Any]:
    """`each` devices of every process, process by process."""
    chosen = []
    for index in range(jax.process_count()):
        own = [device for device in devices if device.process_index == index]
        if len(own) < each:
            raise CommandError(
                f"process {index} has {len(own)} devices and its replicas need {each}: lower "
                "--replicas or --devices-per-replica, or start more processes"
            )
        chosen += own[:each]
    return chosen


def _ask_for_cpu_devices(count: int, *, alone: bool) -> None:
    """As many CPU devices as that, unless the user chose a number or jax has started."""
    flags = os.environ.get("XLA_FLAGS", "")
    wanted = _PATIENCE if alone else (*_PATIENCE, _APART)
    new = [flag for flag in wanted if flag.partition("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *new]).strip()
    chosen = getattr(jax.config, "jax_num_cpu_devices", -1) > 0
    if chosen or "xla_force_host_platform_device_count" in flags:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # devices are in use already: there are as many as there are
        return


@dataclasses.dataclass(frozen=True)
class Text:
    """What a run reads.

    Attributes:
      shares: one uint8 vector per replica that this process has a part of.
      replicas: the indices of these.
      validation: uint8 (batches, windows, context_length + 1), the same for every run.
      fingerprint: of the corpus.
      description: in words.
    """

    shares: tuple[np.ndarray, ...]
    replicas: tuple[int, ...]
    validation: np.ndarray
    fingerprint: str
    description: str


def divide_text(
    config: TrainConfig, corpus: Corpus, mesh: Mesh | js.VirtualMesh | None = None
) -> Text:
    """Divides the corpus of a configuration; keeps what this process trains on.

    To divide it alike, and to leave out duplicates, every process looks at all files.

    Args:
      config: of the run.
      corpus: what `read_corpus` found in `config.data`.
      mesh: of its step; None keeps the text of all replicas.

    Raises:
      ValueError: if there is not enough text, as in `jaxslowmo.data`.
    """
    context = gpt_preset(config.preset).context_length
    # As many windows as all microbatches and devices that share them can share evenly.
    even = config.num_microbatches * config.model_axes.get("fsdp", 1)
    windows = even * math.ceil(max(1, _EVAL_BYTES_PER_BATCH // context) / even)
    split = split_corpus(corpus, config.replicas)
    # Made only for its checks: every replica must hold a batch.
    TextBatches(split.shares, batch_size=config.batch, window=context + 1, seed=config.seed)
    skipped = f", {len(corpus.skipped)} skipped" if corpus.skipped else ""
    own = range(config.replicas) if mesh is None else own_parts(mesh, mesh.axis_names[:1])
    return Text(
        # Copies, so that the text of the others can be forgotten.
        shares=tuple(split.shares[replica].copy() for replica in own),
        replicas=tuple(own),
        validation=validation_batches(
            split.validation,
            num_batches=config.eval_batches,
            batch_size=windows,
            window=context + 1,
        ),
        fingerprint=corpus.contents.fingerprint,
        description=(
            f"{corpus.source}: {len(corpus.documents)} files{skipped}, "
            f"{corpus.num_bytes / 1e6:.1f} MB, {split.validation.size / 1e6:.2f} MB held out"
        ),
    )


class RunBatches(Iterator[np.ndarray]):
    """The batches of a run, each process making those of the replicas that it has a part of.

    Args:
      text: what `divide_text` returned.
      config: of the run.
      mesh: of the step that takes them.

    Attributes:
      position: index of the next batch.
    """

    def __init__(
        self,
        text: Text,
        config: TrainConfig,
        mesh: Mesh | js.VirtualMesh,
    ) -> None:
        self._batches = TextBatches(
            text.shares,
            batch_size=config.batch,
            window=gpt_preset(config.preset).context_length + 1,
            seed=config.seed,
            replicas=text.replicas,
        )
        # Processes may share a replica: each trains on the rows of its own devices.
        # Axes over which the model is shared split no batch here: the program does, if anyone.
        axes = tuple(name for name in mesh.axis_names if name not in MODEL_AXES)
        devices = math.prod(mesh.shape[name] for name in axes[1:])
        begins = [
            text.replicas.index(part // devices) * devices + part % devices
            for part in own_parts(mesh, axes)
        ]
        rows = np.arange(config.batch * len(text.replicas)).reshape(-1, config.batch // devices)
        self._rows = rows[begins].ravel()
        self.position = 0

    def batch(self, index: int) -> np.ndarray:
        """This process' part of batch `index`: (rows, window) uint8, replica-major."""
        return self._batches.batch(index)[self._rows]

    def get_state(self) -> int:
        """The position: of the batches that were taken, also of those not trained on yet."""
        return self.position

    def __next__(self) -> np.ndarray:
        batch = self.batch(self.position)
        self.position += 1
        return batch
