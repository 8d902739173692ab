"""Batches of replicas that have different amounts of data."""

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
from .batches import from_parts, is_of_processes, own_parts, processes_of, topic_of

OnExhausted = Literal["follow", "raise"]
_OWNER = "uneven_batches"
# A loader may take its time before a first batch.
PATIENCE_SECONDS = 1800.0
_ELSEWHERE = -1  # what a process gathers for replicas of which it has no device


class WeightedBatch(NamedTuple):
    """A batch with each replica's weight in it; `js.train_loop` hands both to the step.

    Attributes:
      batch: leaves with leading dimension replicas * local batch, replica-major; of all replicas,
        in several processes as arrays over all of them.
      weight: (replicas,) float32, samples of each replica; 0 for one that has run out.
    """

    batch: PyTree
    weight: Any


class Others:
    """The processes of a mesh, asked before every batch.

    By notes: an exchange of devices would wait for all steps that were started before.

    Args:
      mesh: of several processes, which make these objects in one order.
      axes: those of the replicas.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self._mesh, self._axes, self._processes = mesh, axes, processes_of(mesh)
        self._topic = topic_of("uneven", mesh)
        self._batches = 0

    def known(self, own: np.ndarray) -> np.ndarray:
        """(processes, *s) int32: what each process knows of its batch, (*s).

        Raises:
          RuntimeError: another process could not give its batch, or does not answer.

        Communication: that of `gather_notes`.
        """
        notes = [json.loads(note) for note in self._gather(json.dumps(own.tolist()))]
        for process, note in zip(self._processes, notes, strict=True):
            if isinstance(note, str):
                raise RuntimeError(
                    f"{_OWNER}: `shares` of process {process} ended in an error: {note}"
                )
        return np.array(notes, np.int32)

    def placed(self, x: Any) -> jax.Array:
        """The array over all processes of which this one gives its replicas' part."""
        return from_parts(x, self._mesh, self._axes)

    def tell_failure(self, error: Exception) -> None:
        """Tell the others that this process has no batch to give, as soon as they ask.

        Communication: that of `gather_notes`.
        """
        with contextlib.suppress(RuntimeError):  # `error` is what will be raised
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
            # Who has told of this batch has read what was told of the last one.
            forget(f"{self._topic}/{self._batches - 1}")
        return notes


def uneven_batches(
    shares: Sequence[Iterable[PyTree]],
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
    on_exhausted: OnExhausted = "follow",
) -> Iterator[WeightedBatch]:
    """Join the batches of replicas of which some have fewer than others.

    Goes on until the last replica has run out. One that has run out earlier repeats its last batch
    with weight 0, so it computes along, adds nothing and ends with the same parameters (torch's
    `Join`):

        for result in js.train_loop(step, state, js.uneven_batches(shares, mesh=mesh)): ...

    Args:
      shares: for each replica of which this process has devices, its batches: trees of arrays
        (samples, ...) of the same shapes throughout. One may be empty, if another of this process
        is not. Processes that share a replica give the same batches for it, all of its samples.
      mesh: the step's mesh.
      axis_name: the replica axis.
      on_exhausted: `"follow"`, or `"raise"` when one replica runs out before another.

    Yields:
      A `WeightedBatch`: weight is the number of samples of each replica. In several processes both
      are arrays over all of them, which a step takes as they are, whatever its `host_batch`.

    Raises:
      ValueError: another number of shares than replicas here, another `on_exhausted`; on all
        processes: shapes or structures that differ between batches, no batch at all, a replica for
        which the processes that share it give different numbers of samples.
      RuntimeError: `on_exhausted="raise"` and some replicas have run out; says which. On the other
        processes, where the shares of one raise an error: says which and what; or where one has not
        given its batch for half an hour.

    Communication: with several processes, before each batch two messages of each to the
      coordinator, of some bytes per replica, and the answer; devices are not waited for. None with
      one process.

    Source: torch 2.13, `torch.distributed.algorithms.Join`.
    """
    check_choice("on_exhausted", on_exhausted, OnExhausted, _OWNER)
    replicas = replica_count(_OWNER, mesh, axis_name)
    axes = axis_names(axis_name)
    here = list(own_parts(mesh, axes))
    if len(shares) != len(here):
        raise ValueError(
            f"{_OWNER}: `shares` must hold the batches of each replica of this process, which has "
            f"{len(here)} of {replicas}, got {len(shares)} shares."
        )
    others = Others(mesh, axes) if is_of_processes(mesh) else None
    return _joined([iter(share) for share in shares], here, replicas, others, on_exhausted)


def _next(shares: list[Iterator[PyTree]], others: Others | None) -> list[PyTree | None]:
    """The next batch of each share, None where there is no more."""
    try:
        return [next(share, None) for share in shares]
    except Exception as error:
        if others is not None:
            others.tell_failure(error)
        raise


def _joined(
    shares: list[Iterator[PyTree]],
    here: list[int],
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
        problem = _problem(last, here, reference)
        samples, marks = np.full((2, replicas), _ELSEWHERE, np.int32)
        samples[here] = [
            0 if batch is None or problem else np.shape(jax.tree.leaves(batch)[0])[0]
            for batch in fresh
        ]
        marks[here] = 0 if problem else 1 + zlib.crc32(repr(reference).encode()) % 2**30
        own = np.stack([samples, marks])
        known = own[None] if others is None else others.known(own)
        samples, marks = known.max(axis=0)
        problem = problem or _problem_between(known)
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
            yield WeightedBatch(jax.tree.map(others.placed, batch), others.placed(weight[here]))


def _problem_between(known: np.ndarray) -> str | None:
    """What is wrong with what processes tell, (processes, 2, replicas): samples and marks."""
    held = known != _ELSEWHERE
    samples, marks = np.moveaxis(known, 1, 0)
    found = sorted(set(marks[held[:, 1]].tolist()))
    if found[0] == 0 or len(found) > 1:
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


def _problem(batches: list[PyTree | None], here: list[int], reference: list[str]) -> str | None:
    """What is wrong with the batches of this process, if anything."""
    if not reference:
        return f"replicas {here} of this process have no batch at all, or one without arrays"
    for replica, batch in zip(here, batches, strict=True):
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
