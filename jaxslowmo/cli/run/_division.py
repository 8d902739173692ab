"""The devices that run the replicas of a run, and the text that each replica reads."""

import contextlib
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
from jaxslowmo.train import own_parts

from .._errors import CommandError
from ..config._training import MODEL_AXES, TrainConfig
from ..processes._peers import ALONE, Cluster

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


@dataclasses.dataclass(frozen=True)
class RunDevices:
    """The devices on which the replicas run.

    Attributes:
      mesh: mesh of the training step, with the axes "replica" and, for two levels, "device".
      description: the devices in words.
      is_virtual: whether the replicas are `vmap`ped on one device, so that nothing is sent.
      is_cpu: whether the devices are CPU devices, which share the cores of the host.
    """

    mesh: jax.sharding.Mesh | js.mesh.VirtualMesh
    description: str
    is_virtual: bool
    is_cpu: bool


def choose_mesh(config: TrainConfig, cluster: Cluster = ALONE) -> RunDevices:
    """Return the devices for the replicas; call it before anything else touches a device.

    "devices" is one device per replica (times `devices_per_replica`), on CPU as many as are
    needed; "virtual" is all replicas on one device; "auto" is devices where there are enough of
    them, else virtual. With several processes each provides the same number of devices, in order of
    processes; they belong to whole replicas, or to a part of one.

    Raises:
      ValueError: a process has fewer devices than its part, or the run does not allow several.
      CommandError: there are fewer devices than "devices" needs, they cannot be divided evenly
        among the processes, or the run needs other devices.
    """
    if cluster.count > 1:
        config.check_processes(cluster.count)
        if config.execution == "virtual":
            raise CommandError("--execution virtual is for one process, and devices for several")
    _check_division(config, cluster.count)
    ask_for_devices(config, cluster.count)
    replicas, each, shared = config.replicas, config.devices_of_a_replica, config.model_axes
    devices, needed = jax.devices(), replicas * each
    is_cpu, is_short = devices[0].platform == "cpu", len(devices) < needed
    kind = "CPU device" if is_cpu else devices[0].device_kind
    if config.attention == "cudnn" and devices[0].platform not in ("gpu", "cuda"):
        raise CommandError(f"--attention cudnn needs a GPU of NVIDIA, found {kind}")
    if config.execution == "virtual" and shared:
        raise CommandError(
            f"--execution virtual has no devices inside a replica to share the model of --mesh "
            f"{config.mesh} between"
        )
    can_be_virtual = cluster.count == 1 and not shared
    if config.execution == "virtual" or (
        config.execution == "auto" and is_short and can_be_virtual
    ):
        inside = f" of {each} virtual devices" if each > 1 else ""
        description = f"{replicas} virtual replicas{inside} on one {kind}"
        return RunDevices(js.virtual_mesh(config.axes), description, is_virtual=True, is_cpu=is_cpu)
    if is_short:
        own = f"--replicas {replicas} with --devices-per-replica {config.devices_per_replica}"
        options = own if config.mesh is None else f"--mesh {config.mesh}"
        raise CommandError(
            f"{options} takes {needed} devices, found {len(devices)} ({kind}): use fewer"
            f"{', or --execution virtual' * (not shared)}"
        )
    hosts = f" of {cluster.count} processes" if cluster.count > 1 else ""
    named = f" ({', '.join(f'{name}={n}' for name, n in shared.items())})" if shared else ""
    inside = f" of {each} devices{named}" if each > 1 else ""
    description = f"{replicas} replicas{inside} on {needed} of {len(devices)} {kind}s{hosts}"
    if cluster.count > 1:
        devices = _even_share(devices, needed // cluster.count)
    mesh = js.make_mesh(config.axes, devices=devices[:needed])
    return RunDevices(mesh, description, is_virtual=False, is_cpu=is_cpu)


def _check_division(config: TrainConfig, processes: int) -> None:
    """Raise `CommandError` unless every process has whole replicas, or an equal part of one."""
    replicas, each = config.replicas, config.devices_of_a_replica
    if replicas % processes and processes % replicas:
        raise CommandError(
            f"--replicas must be a multiple of the number of processes, {processes}, or divide it, "
            f"got {replicas}"
        )
    if replicas % processes and each % (processes // replicas):
        what = "--devices-per-replica" if config.mesh is None else "the devices of a replica"
        raise CommandError(
            f"{what} must be a multiple of {processes // replicas}: with --replicas {replicas} and "
            f"{processes} processes each replica spans as many; got {each}"
        )


def ask_for_devices(config: TrainConfig, num_processes: int | None) -> None:
    """Set the number of CPU devices that a process needs, in case jax runs on CPU.

    It changes nothing if the user chose a number or jax has started. Call it before processes are
    joined, too, since that fixes the devices.

    Args:
      config: configuration of the run.
      num_processes: number of processes; None, one device each, if only the launcher knows it.
    """
    needed = config.replicas * config.devices_of_a_replica
    count = 1 if num_processes is None else max(1, needed // num_processes)
    if config.execution == "virtual" or count > MAX_CPU_DEVICES:
        return
    flags = os.environ.get("XLA_FLAGS", "")
    defaults = _PATIENCE if num_processes == 1 else (*_PATIENCE, _NO_COMBINING)
    new = [flag for flag in defaults if flag.partition("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *new]).strip()
    chosen = getattr(jax.config, "jax_num_cpu_devices", -1) > 0
    if not chosen and "xla_force_host_platform_device_count" not in flags:
        with contextlib.suppress(RuntimeError):  # jax has started: the number is fixed
            jax.config.update("jax_num_cpu_devices", count)


def _even_share(devices: list[Any], each: int) -> list[Any]:
    """Return `each` devices of every process, in the order of processes."""
    by_process = [[d for d in devices if d.process_index == i] for i in range(jax.process_count())]
    return [device for local in by_process for device in local[:each]]


@dataclasses.dataclass(frozen=True)
class Text:
    """The text that a run reads.

    Attributes:
      shares: one uint8 vector per replica that this process runs, wholly or in part.
      replicas: indices of these replicas.
      validation: held-out windows, uint8 (batches, windows, context_length + 1), the same for every
        run.
      fingerprint: fingerprint of the corpus.
      description: the corpus in words.
    """

    shares: tuple[np.ndarray, ...]
    replicas: tuple[int, ...]
    validation: np.ndarray
    fingerprint: str
    description: str


def divide_text(
    config: TrainConfig, corpus: Corpus, mesh: Mesh | js.mesh.VirtualMesh | None = None
) -> Text:
    """Divide the corpus among the replicas, and return the text of this process.

    Every process reads all files, to make the same division and leave out the same duplicates.

    Args:
      config: configuration of the run.
      corpus: corpus that `read_corpus` returned for `config.data`.
      mesh: mesh of the training step; None keeps the text of all replicas.

    Raises:
      ValueError: there is not enough text.
    """
    context = gpt_preset(config.preset).context_length
    # A number of windows that microbatches and devices divide evenly.
    even = config.num_microbatches * config.model_axes.get("fsdp", 1)
    windows = even * math.ceil(max(1, _EVAL_BYTES_PER_BATCH // context) / even)
    split = split_corpus(corpus, config.replicas)
    # Raises unless the text of every replica holds a batch.
    TextBatches(split.shares, batch_size=config.batch, window=context + 1, seed=config.seed)
    skipped = f", {len(corpus.skipped)} skipped" if corpus.skipped else ""
    replicas = range(config.replicas) if mesh is None else own_parts(mesh, mesh.axis_names[:1])
    return Text(
        # Copies, so that the text of other replicas can be freed.
        shares=tuple(split.shares[replica].copy() for replica in replicas),
        replicas=tuple(replicas),
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
    """The batches of a run; each process makes the rows of its own devices.

    Args:
      text: text that `divide_text` returned.
      config: configuration of the run.
      mesh: mesh of the training step.

    Attributes:
      position: index of the next batch.
    """

    def __init__(
        self,
        text: Text,
        config: TrainConfig,
        mesh: Mesh | js.mesh.VirtualMesh,
    ) -> None:
        self._batches = TextBatches(
            text.shares,
            batch_size=config.batch,
            window=gpt_preset(config.preset).context_length + 1,
            seed=config.data_seed,
            replicas=text.replicas,
        )
        # Processes may share a replica: each trains on the rows of its own devices.
        # Axes that split the model do not split batches here; the program may do so.
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
        """Return the rows of this process in batch `index`: uint8 (rows, window), replica-major."""
        return self._batches.batch(index)[self._rows]

    def get_state(self) -> int:
        """Return the position, which counts loaded batches, also those not trained on yet."""
        return self.position

    def __next__(self) -> np.ndarray:
        batch = self.batch(self.position)
        self.position += 1
        return batch
