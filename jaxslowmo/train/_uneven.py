"""Batches for replicas that have different amounts of data."""

import contextlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from .._support.checks import check_choice
from .._support.coordinator import NoNoteError, delete_notes, gather_notes
from .._support.types import AxisName, PyTree
from ..mesh import AnyMesh, axis_names, replica_count
from ..tree import leaf_names
from ._batches import addressable_shard_numbers, array_from_shards
from ._process_comparison import is_multi_process, new_topic, process_indices

OnExhausted = Literal["follow", "raise"]
_OWNER = "uneven_batches"
# Loading a first batch may take minutes.
PATIENCE_SECONDS = 1800.0


class WeightedBatch(NamedTuple):
    """A batch and the weights of the replicas; `js.train_loop` passes both to the step.

    Attributes:
      batch: leaves with leading dimension replicas * local batch, replica-major, for all replicas;
        with several processes they are arrays over all processes.
      weight: (replicas,) float32, samples of each replica; 0 for one that has run out.
    """

    batch: PyTree
    weight: Any


def uneven_batches(
    shares: Sequence[Iterable[PyTree]],
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
    on_exhausted: OnExhausted = "follow",
) -> Iterator[WeightedBatch]:
    """Join the replicas' iterators of batches into one; some may end before the others.

    The iterator ends when all replicas have run out. A replica that runs out earlier repeats its
    last batch with weight 0: it computes along, contributes nothing and ends with the same
    parameters as the others (like torch's `Join`):

        for result in js.train_loop(step, state, js.train.uneven_batches(shares, mesh=mesh)): ...

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
    replica_count(_OWNER, mesh, axis_name)
    axes = axis_names(axis_name)
    local_replicas = addressable_shard_numbers(mesh, axes)
    if len(shares) != len(local_replicas):
        raise ValueError(
            f"{_OWNER}: `shares` must be {len(local_replicas)}, one for each replica of this "
            f"process, got {len(shares)}."
        )
    gather = _note_exchange(mesh) if is_multi_process(mesh) else None
    return _weighted_batches([iter(share) for share in shares], mesh, axes, gather, on_exhausted)


_Gather = Callable[[dict[str, Any]], list[dict[str, Any]]]


def _note_exchange(mesh: Mesh) -> _Gather:
    """Return a function that exchanges notes between the processes of a mesh, once for each batch.

    The notes go over the coordinator: an exchange between devices would wait for all steps that
    were started before. All processes make these functions in the same order.
    """
    processes, topic, numbers = process_indices(mesh), new_topic("uneven", mesh), itertools.count(1)

    def gather(note: dict[str, Any]) -> list[dict[str, Any]]:
        number = next(numbers)
        try:
            texts = gather_notes(f"{topic}/{number}", json.dumps(note), processes, PATIENCE_SECONDS)
        except NoNoteError as error:
            raise RuntimeError(
                f"{_OWNER}: another process gave no batch {number} for {PATIENCE_SECONDS:g} s."
            ) from error
        if jax.process_index() == processes[0]:
            # Processes that sent a note for this batch have read the notes for the one before.
            delete_notes(f"{topic}/{number - 1}")
        notes = [json.loads(text) for text in texts]
        for process, each in zip(processes, notes, strict=True):
            if "error" in each:
                raise RuntimeError(
                    f"{_OWNER}: `shares` of process {process} ended in an error: {each['error']}"
                )
        return notes

    return gather


def _weighted_batches(
    iterators: list[Iterator[PyTree]],
    mesh: AnyMesh,
    axes: tuple[str, ...],
    gather: _Gather | None,
    on_exhausted: str,
) -> Iterator[WeightedBatch]:
    local_replicas = addressable_shard_numbers(mesh, axes)
    last: list[PyTree | None] = [None] * len(iterators)
    reference: list[str] = []
    while True:
        try:
            fresh = [next(iterator, None) for iterator in iterators]
        except Exception as error:
            # The others are told, and `error`, which matters more, is raised here.
            with contextlib.suppress(RuntimeError):
                if gather is not None:
                    gather({"error": f"{type(error).__name__}: {error}"[:300]})
            raise
        last = [old if new is None else new for new, old in zip(fresh, last, strict=True)]
        reference = reference or _describe(next((b for b in last if b is not None), {}))
        problem = _problem(last, local_replicas, reference)
        sizes = [0 if b is None or problem else len(jax.tree.leaves(b)[0]) for b in fresh]
        note = {
            "shapes": 0 if problem else 1 + zlib.crc32(repr(reference).encode()),
            "samples": [*zip(local_replicas, sizes, strict=True)],
        }
        notes = [note] if gather is None else gather(note)
        samples, problem_between = _samples(notes)
        if problem := problem or problem_between:
            raise ValueError(f"{_OWNER}: `shares`: {problem}.")
        if not any(samples):
            return
        if on_exhausted == "raise" and not all(samples):
            gone = [replica for replica, size in enumerate(samples) if not size]
            raise RuntimeError(
                f'{_OWNER}: `on_exhausted`="raise" and replicas {gone} have run out.'
            )
        template = next(batch for batch in last if batch is not None)
        whole = [template if batch is None else batch for batch in last]
        batch = jax.tree.map(lambda *parts: np.concatenate(parts), *whole)
        weight = np.array(samples, np.float32)
        if is_multi_process(mesh):
            batch, weight = jax.tree.map(
                lambda x: array_from_shards(x, mesh, axes), (batch, weight[list(local_replicas)])
            )
        yield WeightedBatch(batch, weight)


def _samples(notes: list[dict[str, Any]]) -> tuple[list[int], str | None]:
    """Return the number of samples of each replica, and how the processes disagree, if they do."""
    if len({note["shapes"] for note in notes}) > 1:
        return [], "batches have other shapes on another process"
    sizes: dict[int, set[int]] = {}
    for replica, size in itertools.chain(*(note["samples"] for note in notes)):
        sizes.setdefault(replica, set()).add(size)
    differ = sorted(replica for replica, each in sizes.items() if len(each) > 1)
    if differ:
        counts = [sorted(sizes[replica]) for replica in differ]
        return [], f"processes that share replicas {differ} give {counts} samples for them"
    return [max(sizes[replica]) for replica in sorted(sizes)], None


def _problem(
    batches: list[PyTree | None], local_replicas: Sequence[int], reference: list[str]
) -> str | None:
    """Return what is wrong with the batches of this process; None if nothing is."""
    if not reference:
        return f"replicas {[*local_replicas]} of this process have no batch, or one without arrays"
    for replica, batch in zip(local_replicas, batches, strict=True):
        named = zip(leaf_names(batch), jax.tree.leaves(batch), strict=True)
        if numbers := [name for name, x in named if np.ndim(x) == 0]:
            return f"every leaf must have a dimension of samples, got none in {', '.join(numbers)}"
        if batch is not None and _describe(batch) != reference:
            return (
                f"batches must have the same shapes throughout, got {reference} first and "
                f"{_describe(batch)} on replica {replica}; pad a smaller batch"
            )
    return None


def _describe(batch: PyTree) -> list[str]:
    leaves = zip(leaf_names(batch), jax.tree.leaves(batch), strict=True)
    return [f"{name} {np.shape(x)} {np.asarray(x).dtype}" for name, x in leaves]
