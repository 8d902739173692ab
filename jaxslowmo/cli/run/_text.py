"""What a run reads, and its batches."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

import jaxslowmo as js
from jaxslowmo.data import Corpus, TextBatches, split_corpus, validation_batches
from jaxslowmo.models import gpt_preset
from jaxslowmo.train.batches import own_parts

from ..config._mesh import MODEL_AXES
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
    # As many windows as all microbatches and devices that share them can share evenly.
    even = config.num_microbatches * config.mesh.sizes.get("fsdp", 1)
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
