"""What a run reads, and its batches on the devices."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.data import Corpus, TextBatches, split_corpus, validation_batches
from jaxslowmo.models import gpt_preset

from ..config._train import TrainConfig

_EVAL_BYTES_PER_BATCH = 8192


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
    split = split_corpus(corpus, config.replicas)
    # Made only for its checks: every replica must hold a batch.
    TextBatches(split.shares, batch_size=config.batch, window=context + 1, seed=config.seed)
    skipped = f", {len(corpus.skipped)} skipped" if corpus.skipped else ""
    own = _own_replicas(mesh) if isinstance(mesh, Mesh) else range(config.replicas)
    return Text(
        # Copies, so that the text of the others can be forgotten.
        shares=tuple(split.shares[replica].copy() for replica in own),
        replicas=tuple(own),
        validation=validation_batches(
            split.validation,
            num_batches=config.eval_batches,
            batch_size=max(1, _EVAL_BYTES_PER_BATCH // context),
            window=context + 1,
        ),
        fingerprint=corpus.contents.fingerprint,
        description=(
            f"{corpus.source}: {len(corpus.documents)} files{skipped}, "
            f"{corpus.num_bytes / 1e6:.1f} MB, {split.validation.size / 1e6:.2f} MB held out"
        ),
    )


def _own_replicas(mesh: Mesh) -> list[int]:
    """Those with a device of this process."""
    here = jax.process_index()
    return [
        replica
        for replica, devices in enumerate(mesh.devices)
        if any(device.process_index == here for device in np.ravel(devices))
    ]


class RunBatches(Iterator[jax.Array | np.ndarray]):
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
        # With one process the step places what it gets.
        self._sharding = (
            NamedSharding(mesh, P(mesh.axis_names))
            if isinstance(mesh, Mesh) and mesh.is_multi_process
            else None
        )
        # Of the replicas that this process makes: where the rows of each begin.
        self._begin = {replica: i * config.batch for i, replica in enumerate(text.replicas)}
        self._size, self._rows = config.batch, config.batch * config.replicas
        self.position = 0

    def batch(self, index: int) -> jax.Array | np.ndarray:
        """Batch `index` of all replicas: (replicas * batch, window) uint8, replica-major."""
        own = self._batches.batch(index)
        if self._sharding is None:
            return own

        def of_device(where: Any) -> np.ndarray:
            start, stop, _ = where[0].indices(self._rows)
            # A device has a part of one replica's rows.
            begin = self._begin[start // self._size] + start % self._size
            return own[begin : begin + stop - start]

        shape = (self._rows, own.shape[1])
        return jax.make_array_from_callback(shape, self._sharding, of_device)

    def __next__(self) -> jax.Array | np.ndarray:
        batch = self.batch(self.position)
        self.position += 1
        return batch
