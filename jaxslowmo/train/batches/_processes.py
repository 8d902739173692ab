"""Whether what several processes give for one batch fits together."""

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
from ._placing import HostBatch, num_parts, own_parts, parts_given, uneven


def processes_of(mesh: Mesh) -> list[int]:
    """Numbers of the processes whose devices form the mesh, ascending."""
    return sorted({device.process_index for device in mesh.devices.flat})


_num_topics: Counter[str] = Counter()


def topic_of(kind: str, mesh: Mesh) -> str:
    """Where the processes of a mesh leave notes on one object, which all of them make in one order.

    Args:
      kind: of the object.
      mesh: of several processes.
    """
    name = f"jaxslowmo/{kind}/{zlib.crc32(repr(processes_of(mesh)).encode()):08x}"
    _num_topics[name] += 1
    return f"{name}/{_num_topics[name]}"


# A process may be late for good reason, and later exchanges wait for it anyway.
PATIENCE_SECONDS = 120.0
# Before the network gives up on those that wait in this step's exchange (30 s for gloo).
HINT_SECONDS = 15.0
_MAX_DIFFERENCES = 3


class Note(NamedTuple):
    """What a process tells the others of its batch.

    Attributes:
      call: of the step with a batch of the host, from 1.
      problem: what is wrong with the batch of this process alone, if anything.
      leaves: of the whole batch, as this process counts it.
      digests: by part; at the first step only.
    """

    call: int
    problem: str | None
    leaves: Description
    digests: dict[str, str]


class Verdict(NamedTuple):
    """What one process found, for all: at most one of the two."""

    error: str | None = None
    warning: str | None = None


class Comparison:
    """Compares what the processes give one step, whenever it has another shape.

    Args:
      mesh: the mesh of the step, whose devices several processes have.
      host_batch: what leaves of the host are.
    """

    def __init__(self, mesh: Mesh, host_batch: HostBatch) -> None:
        self._mesh = mesh
        self._host_batch: HostBatch = host_batch
        self._seen: set[Any] = set()
        self._calls = 0
        self._topic: str | None = None

    def __call__(self, batch: PyTree, axes: tuple[str, ...]) -> None:
        """To be called for every batch, with arrays.

        Raises:
          ValueError: on every process: shapes that do not fit together, or values that should be
            the same and are not.

        Communication: none for shapes that were there before; else a note of each process to the
          coordinator, and one back.
        """
        leaves, treedef = jax.tree.flatten(batch)
        own = [(x.shape, x.dtype) for x in leaves if is_of_host(x)]
        self._calls += bool(own)  # what was placed before was compared then
        if not own or (treedef, *own) in self._seen:
            return
        is_first = not self._seen
        self._seen.add((treedef, *own))
        found = self._agree(self._note(batch, axes, is_first))
        if found.error:
            raise ValueError(found.error)
        if found.warning:
            warn_user(found.warning)

    def _note(self, batch: PyTree, axes: tuple[str, ...], is_first: bool) -> Note:
        problem = uneven(batch, self._mesh, axes, self._host_batch)
        if problem:
            return Note(self._calls, problem, [], {})
        count = num_parts(self._mesh, axes)

        def whole(x: Any) -> jax.ShapeDtypeStruct:
            given = parts_given(x, self._mesh, axes, self._host_batch)
            shape = (x.shape[0] // given * count, *x.shape[1:])
            return jax.ShapeDtypeStruct(shape, jax.typeof(x).dtype)

        digests = self._digests(batch, axes) if is_first else {}
        return Note(self._calls, None, describe(jax.tree.map(whole, batch)), digests)

    def _digests(self, batch: PyTree, axes: tuple[str, ...]) -> dict[str, str]:
        arrays = [x for x in jax.tree.leaves(batch) if is_of_host(x)]
        if self._host_batch == "global":
            return {"whole": digest(arrays)}
        own = own_parts(self._mesh, axes)

        def rows(x: Any, i: int) -> Any:
            size = x.shape[0] // len(own)
            return x[i * size : (i + 1) * size]

        return {str(part): digest([rows(x, i) for x in arrays]) for i, part in enumerate(own)}

    def _agree(self, own: Note) -> Verdict:
        """The first process reads what all tell, and tells them what it found."""
        first, *others = processes_of(self._mesh)
        self._topic = self._topic or topic_of("batch", self._mesh)
        key = f"{self._topic}/{len(self._seen)}"
        here = jax.process_index()
        if here != first:
            tell(f"{key}/notes/{here}", json.dumps(own))
            if own.problem:  # no need to hear it from the others
                return Verdict(error=own.problem)
            try:
                return Verdict(*json.loads(self._heard(f"{key}/found", first)))
            except NoNoteError:
                return Verdict(warning=_unheard([first]))
        notes, late = {first: own}, []
        for process in [] if own.problem else others:
            try:
                # Those that come in time have come when the first of them is given up.
                name = f"{key}/notes/{process}"
                text = wait_for(name, 0) if late else self._heard(name, process)
                call, problem, leaves, digests = json.loads(text)
                notes[process] = Note(call, problem, [(n, what) for n, what in leaves], digests)
            except NoNoteError:
                late.append(process)
        found = compared(notes, self._host_batch)
        if late and not found.error:
            found = Verdict(warning=_unheard(late))
        tell(f"{key}/found", json.dumps(found))
        forget(f"{key}/notes")
        return found

    def _heard(self, key: str, process: int) -> str:
        """The note of a process; of a shape that may be new here alone, a warning meanwhile."""
        soon = 0.0 if len(self._seen) == 1 else min(HINT_SECONDS, PATIENCE_SECONDS)
        if soon:
            try:
                return wait_for(key, soon)
            except NoNoteError:
                warn_user(_alone(self._calls, process))
        return wait_for(key, PATIENCE_SECONDS - soon)


def compared(notes: Mapping[int, Note], host_batch: HostBatch) -> Verdict:
    """What is wrong with batches of which processes tell this."""
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
    found = differences([note.leaves for note in notes.values()], list(notes))
    if found:
        more = len(found) - _MAX_DIFFERENCES
        return Verdict(
            error="`batch`: what processes give does not make one batch; its shape would be "
            f"{'; '.join(found[:_MAX_DIFFERENCES])}{f'; and {more} more' if more > 0 else ''}. "
            "Each must give as many rows for each of its parts: pad or drop the last batch, or see "
            "js.uneven_batches."
        )
    return _same_values(notes, host_batch)


def _same_values(notes: Mapping[int, Note], host_batch: HostBatch) -> Verdict:
    holders: dict[str, dict[str, list[int]]] = {}  # by part and digest
    for process, note in notes.items():
        for part, value in note.digests.items():
            holders.setdefault(part, {}).setdefault(value, []).append(process)
    differ = next((list(found.values()) for found in holders.values() if len(found) > 1), None)
    if differ:
        one, other = differ[0][0], differ[1][0]
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
    alike: dict[tuple[str, ...], list[int]] = {}
    for process, note in notes.items():
        alike.setdefault(tuple(note.digests.values()), []).append(process)
    for values, which in alike.items():
        if values and len({tuple(notes[process].digests) for process in which}) > 1:
            return Verdict(
                warning=f"`batch`: {name_processes(which)} give the same data as different parts "
                "of the first batch. Where each process loads the whole batch, pass "
                '`host_batch`="global" to js.make_train_step; where each loads a part, shard the '
                "data by jax.process_index(). If it is alike for good reason, such as zeros in a "
                "test, nothing is wrong."
            )
    return Verdict()


def _alone(call: int, process: int) -> str:
    return (
        f"`batch`: in step {call} this process gives a batch of another shape than before, and "
        f"process {process} has told of none within {HINT_SECONDS:g} s. If it went on with a shape "
        "that it gave before, the exchange of this step hangs or ends in an error of the network: "
        "each process must give as many rows in every step. Pad or drop the last batch, or see "
        "js.uneven_batches. If it is only late, nothing is wrong."
    )


def _unheard(which: list[int]) -> str:
    return (
        f"`batch`: {name_processes(which)} did not tell within {PATIENCE_SECONDS:g} s what they "
        "give, so it was not compared, and training goes on. Either they are late, or they give a "
        "batch of a shape that they gave before while this process has one of another shape."
    )
