"""Batches for replicas that have different amounts of data."""

import contextlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from .._support.checks import check_choice
from .._support.coordinator import NoNoteError, forget, gather_notes
from .._support.types import AxisName, PyTree
from ..mesh import AnyMesh, axis_names, replica_count
from ..tree import leaf_names
from ._batches import from_parts, is_of_processes, own_parts, processes_of, topic_of

OnExhausted = Literal["follow", "raise"]
_OWNER = "uneven_batches"
# Loading a first batch may take minutes.
PATIENCE_SECONDS = 1800.0
_ELSEWHERE = -1  # entry for a replica of which this process has no device


class WeightedBatch(NamedTuple):
    """A batch and the weights of the replicas; `js.train_loop` passes both to the step.

    Attributes:
      batch: leaves with leading dimension replicas * local batch, replica-major, for all replicas;
        with several processes they are arrays over all processes.
      weight: (replicas,) float32, samples of each replica; 0 for one that has run out.
    """

    batch: PyTree
    weight: Any


class Others:
    """The processes of a mesh, which exchange notes before every batch.

    The notes go over the coordinator: an exchange between devices would wait for all steps that
    were started before.

    Args:
      mesh: a mesh over several processes. All make these objects in the same order.
      axes: the replica axes of the mesh.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self._mesh, self._axes, self._processes = mesh, axes, processes_of(mesh)
        self._topic = topic_of("uneven", mesh)
        self._batches = 0

    def gathered(self, local: np.ndarray) -> np.ndarray:
        """Return the int32 arrays (*s) of all processes, stacked: (processes, *s).

        Raises:
          RuntimeError: another process could not load its batch, or does not answer.

        Communication: that of `gather_notes`.
        """
        notes = [json.loads(note) for note in self._gather(json.dumps(local.tolist()))]
        for process, note in zip(self._processes, notes, strict=True):
            if isinstance(note, str):
                raise RuntimeError(
                    f"{_OWNER}: `shares` of process {process} ended in an error: {note}"
                )
        return np.array(notes, np.int32)

    def placed(self, x: Any) -> jax.Array:
        """Return the array over all processes; `x` is the part of this process's replicas."""
        return from_parts(x, self._mesh, self._axes)

    def tell_failure(self, error: Exception) -> None:
        """Tell the other processes that this one failed to load its batch.

        Communication: that of `gather_notes`.
        """
        with contextlib.suppress(RuntimeError):  # the caller raises `error`, which matters more
            self._gather(json.dumps(f"{type(error).__name__}: {error}"[:300]))

    def _gather(self, text: str) -> list[str]:
        self._batches += 1
        topic = f"{self._topic}/{self._batches}"
        try:
            notes = gather_notes(topic, text, self._processes, PATIENCE_SECONDS)
        except NoNoteError as error:
            raise RuntimeError(
                f"{_OWNER}: another process has not given batch {self._batches} for "
                f"{PATIENCE_SECONDS:g} s."
            ) from error
        if jax.process_index() == self._processes[0]:
            # Processes that sent a note for this batch have read the notes for the one before.
            forget(f"{self._topic}/{self._batches - 1}")
        return notes


def uneven_batches(
    shares: Sequence[Iterable[PyTree]],
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
    on_exhausted: OnExhausted = "follow",
) -> Iterator[WeightedBatch]:
    """Join the batches of replicas, of which some have fewer batches than others.

    The iterator ends when all replicas have run out. A replica that runs out earlier repeats its
    last batch with weight 0: it computes along, contributes nothing and ends with the same
    parameters as the others (like torch's `Join`):

        for result in js.train_loop(step, state, js.uneven_batches(shares, mesh=mesh)): ...

    Args:
      shares: the batches of each replica of which this process has devices: trees of arrays
        (samples, ...), all of the same shapes. One share may be empty, if another of this process
        is not. Processes that share a replica pass the same batches for it, with all its samples.
      mesh: the step's mesh.
      axis_name: the replica axis.
      on_exhausted: `"follow"` (the default) as above; `"raise"` raises an error when one replica
        runs out before another.

    Yields:
      A `WeightedBatch`: weight is the number of samples of each replica. With several processes
      both are arrays over all processes, which any step accepts, whatever its `host_batch`.

    Raises:
      ValueError: the number of shares differs from the number of replicas in this process, or
        another `on_exhausted`; on all processes: shapes or structures that differ between batches,
        no batch at all, different numbers of samples from processes that share a replica.
      RuntimeError: `on_exhausted="raise"` and some replicas have run out; names them. On the other
        processes, if the shares of one raise an error: names process and error; or if one has not
        loaded its batch for half an hour.

    Communication: with several processes, each sends two messages to the coordinator before each
      batch, of some bytes per replica, and receives the answer; nothing waits for devices. None
      with one process.

    Source: torch 2.13, `torch.distributed.algorithms.Join`.
    """
    check_choice("on_exhausted", on_exhausted, OnExhausted, _OWNER)
    replicas = replica_count(_OWNER, mesh, axis_name)
    axes = axis_names(axis_name)
    local_replicas = list(own_parts(mesh, axes))
    if len(shares) != len(local_replicas):
        raise ValueError(
            f"{_OWNER}: `shares` must hold the batches of each replica of this process, which has "
            f"{len(local_replicas)} of {replicas}, got {len(shares)} shares."
        )
    others = Others(mesh, axes) if is_of_processes(mesh) else None
    return _joined(
        [iter(share) for share in shares], local_replicas, replicas, others, on_exhausted
    )


def _next(shares: list[Iterator[PyTree]], others: Others | None) -> list[PyTree | None]:
    """Return the next batch of each share, None for a share that has ended."""
    try:
        return [next(share, None) for share in shares]
    except Exception as error:
        if others is not None:
            others.tell_failure(error)
        raise


def _joined(
    shares: list[Iterator[PyTree]],
    local_replicas: list[int],
    replicas: int,
    others: Others | None,
    on_exhausted: str,
) -> Iterator[WeightedBatch]:
    last: list[PyTree | None] = [None] * len(shares)
    reference: list[str] = []
    while True:
        fresh = _next(shares, others)
        last = [old if new is None else new for new, old in zip(fresh, last, strict=True)]
        reference = reference or _describe(next((b for b in last if b is not None), {}))
        problem = _problem(last, local_replicas, reference)
        samples, marks = np.full((2, replicas), _ELSEWHERE, np.int32)
        samples[local_replicas] = [
            0 if batch is None or problem else np.shape(jax.tree.leaves(batch)[0])[0]
            for batch in fresh
        ]
        marks[local_replicas] = 0 if problem else 1 + zlib.crc32(repr(reference).encode()) % 2**30
        local = np.stack([samples, marks])
        notes = local[None] if others is None else others.gathered(local)
        samples, marks = notes.max(axis=0)
        problem = problem or _problem_between(notes)
        if problem:
            raise ValueError(f"{_OWNER}: `shares`: {problem}.")
        if not samples.any():
            return
        if on_exhausted == "raise" and not samples.all():
            gone = np.flatnonzero(samples == 0).tolist()
            raise RuntimeError(
                f"{_OWNER}: replicas {gone} have run out of batches before the others, and "
                '`on_exhausted`="raise".'
            )
        template = next(batch for batch in last if batch is not None)
        whole = [template if batch is None else batch for batch in last]
        batch = jax.tree.map(lambda *parts: np.concatenate(parts), *whole)
        weight = samples.astype(np.float32)
        if others is None:
            yield WeightedBatch(batch, weight)
        else:
            yield WeightedBatch(
                jax.tree.map(others.placed, batch), others.placed(weight[local_replicas])
            )


def _problem_between(notes: np.ndarray) -> str | None:
    """Return how the processes' (processes, 2, replicas) samples and marks disagree, if they do."""
    held = notes != _ELSEWHERE
    samples, marks = np.moveaxis(notes, 1, 0)
    distinct = sorted(set(marks[held[:, 1]].tolist()))
    if distinct[0] == 0 or len(distinct) > 1:
        by_replica = marks.max(axis=0).tolist()
        return (
            "batches have other shapes on another process "
            f"(marks {by_replica} of the replicas' shapes, 0 where they change)"
        )
    least = np.where(held[:, 0], samples, np.iinfo(samples.dtype).max).min(axis=0)
    differ = np.flatnonzero(least != samples.max(axis=0)).tolist()
    if differ:
        return (
            f"processes that share replicas {differ} must give the same batches for them, and give "
            f"{least[differ].tolist()} samples and {samples.max(axis=0)[differ].tolist()}"
        )
    return None


def _problem(
    batches: list[PyTree | None], local_replicas: list[int], reference: list[str]
) -> str | None:
    """Return what is wrong with the batches of this process; None if nothing is."""
    if not reference:
        return (
            f"replicas {local_replicas} of this process have no batch at all, or one without arrays"
        )
    for replica, batch in zip(local_replicas, batches, strict=True):
        named = zip(leaf_names(batch), jax.tree.leaves(batch), strict=True)
        if numbers := [name for name, x in named if np.ndim(x) == 0]:
            return f"every leaf must have a dimension of samples, got none in {', '.join(numbers)}"
        if batch is not None and _describe(batch) != reference:
            return (
                f"batches must have the same leaves and shapes throughout, got {reference} first "
                f"and {_describe(batch)} on replica {replica}; pad a smaller batch and leave its "
                "padding out of the loss"
            )
    return None


def _describe(batch: PyTree) -> list[str]:
    leaves = zip(leaf_names(batch), jax.tree.leaves(batch), strict=True)
    return [f"{name} {np.shape(x)} {np.asarray(x).dtype}" for name, x in leaves]
