"""Text that is on every machine: the source files of Python's standard library, as bytes."""

import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import IterableDataset

# Folders of tests, tables and installed packages.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}


class Text(NamedTuple):
    """The bytes of training and validation files, as 1-D uint8 arrays."""

    train: np.ndarray
    validation: np.ndarray


def standard_library() -> Text:
    """Return the standard library's source, about 10 MB; one file in ten is for validation."""
    root, parts = Path(sysconfig.get_path("stdlib")), (list[bytes](), list[bytes]())
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not LEFT_OUT & set(name.parts):
            # By the hash of its name, so that other versions of Python split files in the same way.
            parts[crc32(name.as_posix().encode()) % 10 == 0].append(path.read_bytes())
    return Text(*(np.frombuffer(b"\n".join(part), np.uint8) for part in parts))


class TextStream(IterableDataset):
    """An endless stream of samples {"input_ids", "labels"}, both equal int64 tokens (length,).

    Every epoch cuts the text at different places and shuffles the pieces. The same arguments give
    the same samples in the same order. `seed` selects the stream, for example (seed of the run,
    rank). `skip` is the number of samples to leave out at the beginning, to resume a run.
    """

    def __init__(
        self, text: np.ndarray, *, length: int, seed: int | tuple[int, ...], skip: int = 0
    ):
        self.text, self.length, self.skip = text, length, skip
        self.seed = seed if isinstance(seed, tuple) else (seed,)
        self.epoch_size = len(text) // length - 1

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        first_epoch, first = divmod(self.skip, self.epoch_size)
        for epoch in count(first_epoch):
            rng = np.random.default_rng((*self.seed, epoch))
            shift = rng.integers(self.length)
            for piece in rng.permutation(self.epoch_size)[first:]:
                begin = shift + piece * self.length
                tokens = torch.from_numpy(self.text[begin : begin + self.length].astype(np.int64))
                yield {"input_ids": tokens, "labels": tokens}
            first = 0


def validation_batch(text: np.ndarray, *, num_samples: int, length: int) -> torch.Tensor:
    """Return pieces at equal distances in the text, int64 (num_samples, length)."""
    distance = len(text) // num_samples
    pieces = text[: num_samples * distance].reshape(num_samples, distance)[:, :length]
    return torch.from_numpy(pieces.astype(np.int64))
