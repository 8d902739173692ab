"""What a run reads, and its batches on the devices."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.data import TextBatches, read_corpus, split_corpus, validation_batches
from jaxslowmo.models import gpt_preset

from ._cluster import ALONE, Cluster
from ._config import TrainConfig

_EVAL_BYTES_PER_BATCH = 8192


@dataclasses.dataclass(frozen=True)
class Text:
    """What a run reads.

    Attributes:
        shares: one uint8 vector per replica of this process.
        first_replica: the index of the first of these.
        validation: uint8 (batches, windows, context_length + 1), the same for every run.
        description: in words.
    """

    shares: tuple[np.ndarray, ...]
    first_replica: int
    validation: np.ndarray
    description: str


def load_text(config: TrainConfig, cluster: Cluster = ALONE) -> Text:
    """Reads and divides the corpus of a configuration; keeps what this process trains on.

    To divide it alike, and to leave out duplicates, every process looks at all files.

    Raises:
        ValueError: if there is not enough text, as in `jaxslowmo.data`.
    """
    context = gpt_preset(config.preset).context_length
    corpus = read_corpus(config.data)
    split = split_corpus(corpus, config.replicas)
    # Made only for its checks: every replica must hold a batch.
    TextBatches(split.shares, batch_size=config.batch, window=context + 1, seed=config.seed)
    skipped = f", {len(corpus.skipped)} skipped" if corpus.skipped else ""
    own = config.replicas // cluster.count
    first = own * cluster.index
    return Text(
        # Copies, so that the text of the others can be forgotten.
        shares=tuple(share.copy() for share in split.shares[first : first + own]),
        first_replica=first,
        validation=validation_batches(
            split.validation,
            num_batches=config.eval_batches,
            batch_size=max(1, _EVAL_BYTES_PER_BATCH // context),
            window=context + 1,
        ),
        description=(
            f"{corpus.source}: {len(corpus.documents)} files{skipped}, "
            f"{corpus.num_bytes / 1e6:.1f} MB, {split.validation.size / 1e6:.2f} MB held out"
        ),
    )


class RunBatches(Iterator[jax.Array | np.ndarray]):
    """The batches of a run, each process making those of its own replicas.

    Args:
        text: what `load_text` returned.
        config: of the run.
        mesh: of the step that takes them.
        cluster: the processes of the run.

    Attributes:
        position: index of the next batch.
    """

    def __init__(
        self,
        text: Text,
        config: TrainConfig,
        mesh: jax.sharding.Mesh | js.VirtualMesh,
        cluster: Cluster = ALONE,
    ) -> None:
        self._batches = TextBatches(
            text.shares,
            batch_size=config.batch,
            window=gpt_preset(config.preset).context_length + 1,
            seed=config.seed,
            first_replica=text.first_replica,
        )
        # With one process the step places what it gets.
        self._sharding = (
            NamedSharding(mesh, P(mesh.axis_names))
            if cluster.count > 1 and isinstance(mesh, jax.sharding.Mesh)
            else None
        )
        self.position = 0

    def batch(self, index: int) -> jax.Array | np.ndarray:
        """Batch `index` of all replicas: (replicas * batch, window) uint8, replica-major."""
        own = self._batches.batch(index)
        if self._sharding is None:
            return own
        return jax.make_array_from_process_local_data(self._sharding, own)

    def __next__(self) -> jax.Array | np.ndarray:
        batch = self.batch(self.position)
        self.position += 1
        return batch
