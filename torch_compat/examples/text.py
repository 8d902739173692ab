"""Real text that is on every machine: the source files of Python's standard library, as bytes."""

import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import IterableDataset

# Tests, tables and what others installed.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}
VOCABULARY = 256


class Text(NamedTuple):
    """Bytes to train on and to validate with, from different files; 1-D uint8 arrays."""

    train: np.ndarray
    validation: np.ndarray


def standard_library() -> Text:
    """The standard library's source, about 10 MB; one file in ten is for validation.

    A file's name decides where it goes, so a file stays there in other versions of Python.

    Raises:
      ValueError: if this Python comes without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not LEFT_OUT & set(name.parts):
            parts[crc32(name.as_posix().encode()) % 10 == 0].append(path.read_bytes())
    if not all(parts.values()):
        raise ValueError(f"Python's standard library has no source files in {root}.")
    train, validation = (
        np.frombuffer(b"\n".join(parts[held_out]), np.uint8) for held_out in (False, True)
    )
    return Text(train, validation)


class TextStream(IterableDataset):
    """Endless samples {"input_ids", "labels"}, both int64 of shape (length,) and equal.

    As for models of transformers, which shift the labels themselves. Every epoch cuts the text at
    other places and shuffles the pieces. The same arguments give the same samples in the same
    order; streams of other seeds are independent.

    Args:
      text: 1-D uint8 array.
      length: bytes per sample.
      seed: integers that name the stream, such as (seed of the run, rank).
      skip: samples to leave out at the beginning, to go on where an earlier run stopped.

    Raises:
      ValueError: if `text` is shorter than two samples, or `skip` is negative.
    """

    def __init__(
        self, text: np.ndarray, *, length: int, seed: int | tuple[int, ...], skip: int = 0
    ):
        if not 2 <= length <= len(text) // 2:
            raise ValueError(
                f"`length` must be between 2 and half the text, {len(text) // 2}, got {length}."
            )
        if skip < 0:
            raise ValueError(f"`skip` counts samples and must be >= 0, got {skip}.")
        self.text, self.length, self.skip = text, length, skip
        self.seed = seed if isinstance(seed, tuple) else (seed,)
        self.epoch_size = len(text) // length - 1

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        first_epoch, first = divmod(self.skip, self.epoch_size)
        for epoch in count(first_epoch):
            rng = np.random.default_rng((*self.seed, epoch))
            shift = rng.integers(self.length)
            order = rng.permutation(self.epoch_size)
            for piece in order[first:]:
                begin = shift + piece * self.length
                tokens = torch.from_numpy(self.text[begin : begin + self.length].astype(np.int64))
                yield {"input_ids": tokens, "labels": tokens}
            first = 0


def validation_batch(text: np.ndarray, *, num_samples: int, length: int) -> torch.Tensor:
    """Pieces at equal distances, always the same: int64 of shape (num_samples, length).

    Raises:
      ValueError: if the text is too short for that many.
    """
    distance = len(text) // num_samples
    if distance < length:
        raise ValueError(
            f"The text has {len(text)} bytes, too few for {num_samples} samples of {length}."
        )
    pieces = [text[i * distance : i * distance + length] for i in range(num_samples)]
    return torch.from_numpy(np.stack(pieces).astype(np.int64))
