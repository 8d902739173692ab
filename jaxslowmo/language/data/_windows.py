"""Batches of windows: random ones to train on, fixed ones to evaluate on."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np


class TextBatches(Iterator[np.ndarray]):
    """Endless random windows, stacked over replicas; resumable.

    Batch i depends only on (seed, replica, i): the windows of one replica are the same whatever
    the other replicas read and wherever a run resumed.

    Args:
      shares: one uint8 vector per replica (`TextSplit.shares`).
      batch_size: windows per replica, >= 1.
      window: bytes per window, >= 2: the model's context length + 1.
      seed: of the random positions, >= 0.
      replicas: which replicas the shares are of, for a process that makes only the batches of its
        own; default 0, 1, ...

    Raises:
      ValueError: for a number out of range, `replicas` that are not one per share, or a share
        smaller than one batch.

    Example:
        >>> batches = TextBatches([np.arange(100, dtype=np.uint8)], batch_size=2, window=5, seed=0)
        >>> next(batches).shape, batches.get_state()["next_batch"]
        ((2, 5), 1)
    """

    def __init__(
        self,
        shares: Sequence[np.ndarray],
        *,
        batch_size: int,
        window: int,
        seed: int,
        replicas: Sequence[int] | None = None,
    ):
        _check_sizes(batch_size=batch_size, window=window)
        if seed < 0:
            raise ValueError(f"`seed` must be >= 0, got {seed}.")
        replicas = tuple(range(len(shares)) if replicas is None else replicas)
        if len(replicas) != len(shares) or min(replicas, default=0) < 0:
            raise ValueError(
                f"`replicas` must be one index >= 0 for each of the {len(shares)} shares, got "
                f"{replicas}."
            )
        for replica, share in zip(replicas, shares, strict=True):
            if share.size < batch_size * window:
                raise ValueError(
                    f"`data` must hold at least one batch per replica, {batch_size} windows of "
                    f"{window} bytes = {batch_size * window} bytes; replica {replica} of "
                    f"{len(shares)} got {share.size}: use more text, fewer replicas, "
                    "a smaller batch or a shorter context."
                )
        self._shares = tuple(shares)
        self._batch_size = batch_size
        self._window = window
        self._seed = seed
        self._replicas = replicas
        self._next_batch = 0

    def batch(self, index: int) -> np.ndarray:
        """Batch `index`, 0, 1, ...: (replicas * batch_size, window) uint8, replica-major."""
        return np.concatenate([self._of(which, index) for which in range(len(self._shares))])

    def __next__(self) -> np.ndarray:
        batch = self.batch(self._next_batch)
        self._next_batch += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Where the iterator is, as plain JSON values."""
        return {
            "next_batch": self._next_batch,
            "seed": self._seed,
            "replicas": list(self._replicas),
            "batch_size": self._batch_size,
            "window": self._window,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues where `get_state` was called.

        Raises:
          ValueError: if the state is of an iterator that would give other batches.
        """
        mine = self.get_state()
        for name in mine.keys() - {"next_batch"}:
            if state.get(name) != mine[name]:
                raise ValueError(
                    f"`state` must be of an iterator with {name}={mine[name]}, "
                    f"got {state.get(name)}."
                )
        next_batch = state.get("next_batch")
        if not isinstance(next_batch, int) or next_batch < 0:
            raise ValueError(f"`state['next_batch']` must be an int >= 0, got {next_batch!r}.")
        self._next_batch = next_batch

    def _of(self, which: int, index: int) -> np.ndarray:
        share = self._shares[which]
        random = np.random.default_rng([self._seed, self._replicas[which], index])
        starts = random.integers(0, share.size - self._window + 1, size=self._batch_size)
        return share[starts[:, None] + np.arange(self._window)]


def validation_batches(
    text: np.ndarray, *, num_batches: int, batch_size: int, window: int
) -> np.ndarray:
    """Evenly spaced windows of the held-out text, the same at every call and for every seed.

    Args:
      text: uint8 vector (`TextSplit.validation`).
      num_batches: batches to make, >= 1.
      batch_size: windows per batch, >= 1.
      window: bytes per window, >= 2.

    Returns:
      uint8 (num_batches, batch_size, window). Windows overlap only where the text is too short
      for that many.

    Raises:
      ValueError: for a number out of range, or a text shorter than one window.
    """
    _check_sizes(num_batches=num_batches, batch_size=batch_size, window=window)
    if text.size < window:
        raise ValueError(
            f"`data` must leave at least one window of {window} bytes for validation, "
            f"got {text.size}: use more text or a shorter context."
        )
    starts = np.linspace(0, text.size - window, num_batches * batch_size).astype(np.int64)
    windows = text[starts[:, None] + np.arange(window)]
    return windows.reshape(num_batches, batch_size, window)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        least = 2 if name == "window" else 1
        if value < least:
            raise ValueError(f"`{name}` must be >= {least}, got {value}.")
