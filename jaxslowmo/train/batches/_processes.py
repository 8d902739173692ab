"""Checks that the parts of a batch that several processes pass fit together."""

import json
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from ..._support.checks import warn_user
from ..._support.coordinator import NoNoteError, forget, tell, wait_for
from ..._support.types import PyTree
from ...mesh import Description, describe, differences, digest, is_of_host, name_processes
from ._placing import HostBatch, is_split, num_parts, num_parts_in, own_parts, uneven


def processes_of(mesh: Mesh) -> list[int]:
    """Return the indices of the processes whose devices form the mesh, ascending."""
    return sorted({device.process_index for device in mesh.devices.flat})


_num_topics: Counter[str] = Counter()


def topic_of(kind: str, mesh: Mesh) -> str:
    """Return a new key prefix for messages about one object between the processes of a mesh.

    All processes must create such objects in the same order.

    Args:
      kind: kind of the object, such as "batch".
      mesh: mesh whose devices belong to several processes.
    """
    name = f"jaxslowmo/{kind}/{zlib.crc32(repr(processes_of(mesh)).encode()):08x}"
    _num_topics[name] += 1
    return f"{name}/{_num_topics[name]}"


# How long to wait for another process. It may be late for a good reason, and the exchanges of the
# step wait for it anyway.
PATIENCE_SECONDS = 120.0
# When to warn that another process may be stuck: before the network of its exchange gives up (gloo
# after 30 s).
HINT_SECONDS = 15.0
_MAX_DIFFERENCES = 3
_SHARED = "shared"  # in `Note.digests`, in place of a part


class Note(NamedTuple):
    """A description of one process' batch that it sends to the others.

    Attributes:
      call: number of the call with a batch in host arrays, from 1.
      problem: error message if the batch of this process is wrong by itself, else None.
      leaves: names, shapes and dtypes of the whole batch, as this process infers it.
      digests: checksum of the data of each part, and of what all examples share under "shared", at
        the first step only.
    """

    call: int
    problem: str | None
    leaves: Description
    digests: dict[str, str]


class Verdict(NamedTuple):
    """The result of a comparison, the same for all processes; at most one text is set."""

    error: str | None = None
    warning: str | None = None


class Comparison:
    """A check that compares the batches of all processes whenever their shapes are new.

    Args:
      mesh: mesh of the step, whose devices belong to several processes.
      host_batch: whether host arrays hold this process' parts ("local") or the whole ("global").
    """

    def __init__(self, mesh: Mesh, host_batch: HostBatch) -> None:
        self._mesh = mesh
        self._host_batch: HostBatch = host_batch
        self._seen: set[Any] = set()
        self._calls = 0
        self._topic: str | None = None

    def __call__(self, batch: PyTree, axes: tuple[str, ...]) -> None:
        """Compare a batch of arrays with those of the other processes; call it for every batch.

        Raises:
          ValueError: raised on every process: the shapes do not fit together, or values that must
            be equal differ.

        Communication: none for shapes that were compared before; else one message of each process
          to the coordinator, and one back.
        """
        leaves, treedef = jax.tree.flatten(batch)
        types = [(x.shape, x.dtype) for x in leaves if is_of_host(x)]
        self._calls += bool(types)  # arrays on devices were compared when placed
        if not types or (treedef, *types) in self._seen:
            return
        is_first = not self._seen
        self._seen.add((treedef, *types))
        verdict = self._agree(self._note(batch, axes, is_first))
        if verdict.error:
            raise ValueError(verdict.error)
        if verdict.warning:
            warn_user(verdict.warning)

    def _note(self, batch: PyTree, axes: tuple[str, ...], is_first: bool) -> Note:
        problem = uneven(batch, self._mesh, axes, self._host_batch)
        if problem:
            return Note(self._calls, problem, [], {})
        count = num_parts(self._mesh, axes)

        def whole(x: Any) -> jax.ShapeDtypeStruct:
            shape = x.shape
            if is_split(x, self._mesh, axes, self._host_batch):
                num_held = num_parts_in(x, self._mesh, axes, self._host_batch)
                shape = (shape[0] // num_held * count, *shape[1:])
            return jax.ShapeDtypeStruct(shape, jax.typeof(x).dtype)

        digests = self._digests(batch, axes) if is_first else {}
        return Note(self._calls, None, describe(jax.tree.map(whole, batch)), digests)

    def _digests(self, batch: PyTree, axes: tuple[str, ...]) -> dict[str, str]:
        arrays = [x for x in jax.tree.leaves(batch) if is_of_host(x)]
        if self._host_batch == "global":
            return {"whole": digest(arrays)}
        parts = own_parts(self._mesh, axes)
        split = [x for x in arrays if is_split(x, self._mesh, axes, self._host_batch)]
        shared = [x for x in arrays if not is_split(x, self._mesh, axes, self._host_batch)]

        def rows(x: Any, i: int) -> Any:
            size = x.shape[0] // len(parts)
            return x[i * size : (i + 1) * size]

        digests = {str(part): digest([rows(x, i) for x in split]) for i, part in enumerate(parts)}
        return digests | ({_SHARED: digest(shared)} if shared else {})

    def _agree(self, local_note: Note) -> Verdict:
        """Send all notes to the first process, which compares them and sends back the verdict."""
        first, *others = processes_of(self._mesh)
        self._topic = self._topic or topic_of("batch", self._mesh)
        key = f"{self._topic}/{len(self._seen)}"
        rank = jax.process_index()
        if rank != first:
            tell(f"{key}/notes/{rank}", json.dumps(local_note))
            if local_note.problem:  # its error is known without the others
                return Verdict(error=local_note.problem)
            try:
                return Verdict(*json.loads(self._received(f"{key}/found", first)))
            except NoNoteError:
                return Verdict(warning=_silent_warning([first]))
        notes, silent = {first: local_note}, []
        for process in [] if local_note.problem else others:
            try:
                # After one timeout the other notes are either there or late, so don't wait again.
                name = f"{key}/notes/{process}"
                text = wait_for(name, 0) if silent else self._received(name, process)
                call, problem, leaves, digests = json.loads(text)
                notes[process] = Note(call, problem, [(n, what) for n, what in leaves], digests)
            except NoNoteError:
                silent.append(process)
        verdict = compared(notes, self._host_batch)
        if silent and not verdict.error:
            verdict = Verdict(warning=_silent_warning(silent))
        tell(f"{key}/found", json.dumps(verdict))
        forget(f"{key}/notes")
        return verdict

    def _received(self, key: str, process: int) -> str:
        """Wait for a message; after the first shape also warn early that it may never come."""
        soon = 0.0 if len(self._seen) == 1 else min(HINT_SECONDS, PATIENCE_SECONDS)
        if soon:
            try:
                return wait_for(key, soon)
            except NoNoteError:
                warn_user(_shape_warning(self._calls, process))
        return wait_for(key, PATIENCE_SECONDS - soon)


def compared(notes: Mapping[int, Note], host_batch: HostBatch) -> Verdict:
    """Return what is wrong with the batches that the notes of the processes describe."""
    for process, note in notes.items():
        if note.problem:
            return Verdict(error=f"process {process}: {note.problem}")
    calls = {process: note.call for process, note in notes.items()}
    if len(set(calls.values())) > 1:
        return Verdict(
            error="`batch`: processes give a batch of another shape in different steps: "
            + ", ".join(f"process {process} in step {call}" for process, call in calls.items())
            + "."
        )
    differs = differences([note.leaves for note in notes.values()], list(notes))
    if differs:
        more = len(differs) - _MAX_DIFFERENCES
        return Verdict(
            error="`batch`: what processes give does not make one batch; its shape would be "
            f"{'; '.join(differs[:_MAX_DIFFERENCES])}{f'; and {more} more' if more > 0 else ''}. "
            "Each must give as many rows for each of its parts: pad or drop the last batch, or see "
            "js.uneven_batches."
        )
    return _same_values(notes, host_batch)


def _same_values(notes: Mapping[int, Note], host_batch: HostBatch) -> Verdict:
    holders: dict[str, dict[str, list[int]]] = {}  # part -> digest -> processes
    for process, note in notes.items():
        for part, value in note.digests.items():
            holders.setdefault(part, {}).setdefault(value, []).append(process)
    differ = next(((part, digests) for part, digests in holders.items() if len(digests) > 1), None)
    if differ:
        part, (one, other, *_) = differ[0], [which[0] for which in differ[1].values()]
        if part == _SHARED:
            return Verdict(
                error="`batch`: a leaf that all examples share, without a dimension or with a "
                "leading one of 1, must be the same on every process, and processes "
                f"{one} and {other} give different ones."
            )
        if host_batch == "global":
            return Verdict(
                error='`batch`: `host_batch`="global" takes the same whole batch on every process, '
                f"and processes {one} and {other} give different ones; "
                '`host_batch`="local" takes what each process has of it.'
            )
        return Verdict(
            error=f"`batch`: processes {one} and {other} hold the same part of the batch, since "
            "their devices differ along axes over which it is not split, and give different data."
        )
    by_data: dict[tuple[str, ...], list[int]] = {}
    for process, note in notes.items():
        by_data.setdefault(tuple(note.digests.values()), []).append(process)
    for values, which in by_data.items():
        if values and len({tuple(notes[process].digests) for process in which}) > 1:
            return Verdict(
                warning=f"`batch`: {name_processes(which)} give the same data as different parts "
                "of the first batch. Where each process loads the whole batch, pass "
                '`host_batch`="global" to js.make_train_step; where each loads a part, shard the '
                "data by jax.process_index(). If it is equal for a good reason, such as zeros in a "
                "test, nothing is wrong."
            )
    return Verdict()


def _shape_warning(call: int, process: int) -> str:
    return (
        f"`batch`: in step {call} this process gives a batch of another shape than before, and "
        f"process {process} has sent none within {HINT_SECONDS:g} s. If it went on with a shape "
        "that it gave before, the exchange of this step hangs or ends in an error of the network: "
        "each process must give as many rows in every step. Pad or drop the last batch, or see "
        "js.uneven_batches. If it is only late, nothing is wrong."
    )


def _silent_warning(which: list[int]) -> str:
    return (
        f"`batch`: {name_processes(which)} did not report within {PATIENCE_SECONDS:g} s what they "
        "give, so it was not compared, and training goes on. Either they are late, or they give a "
        "batch of a shape that they gave before while this process has one of another shape."
    )
