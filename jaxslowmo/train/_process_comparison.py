"""The comparison of what processes have, at the first one of a mesh, over the coordinator."""

import json
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import jax
from jax.sharding import Mesh

from .._support.checks import warn_user
from .._support.coordinator import NoNoteError, delete_notes, wait_for_note, write_note
from ..mesh import AnyMesh

# How long to wait for what another process gives at the first step. It may be late for a good
# reason, and the exchanges of the step wait for it anyway.
PATIENCE_SECONDS = 120.0
# How long at a later step with a batch of another shape. If that process went on with a shape that
# it gave before, the network of its exchange gives up (gloo after 30 s), and the reason must have
# been told before that.
HINT_SECONDS = 15.0


def is_multi_process(mesh: AnyMesh) -> TypeGuard[Mesh]:
    """Return whether devices of several processes form the mesh."""
    return mesh.is_multi_process


def process_indices(mesh: Mesh) -> list[int]:
    """Return the indices of the processes whose devices form the mesh, ascending."""
    return sorted({device.process_index for device in mesh.devices.flat})


_num_topics: Counter[str] = Counter()


def new_topic(kind: str, mesh: Mesh) -> str:
    """Return a new key prefix for messages about one object between the processes of a mesh.

    All processes must create such objects in the same order.

    Args:
      kind: kind of the object, such as "batch".
      mesh: mesh whose devices belong to several processes.
    """
    name = f"jaxslowmo/{kind}/{zlib.crc32(repr(process_indices(mesh)).encode()):08x}"
    _num_topics[name] += 1
    return f"{name}/{_num_topics[name]}"


class Verdict(NamedTuple):
    """The result of a comparison, the same for all processes; at most one text is set."""

    error: str | None = None
    warning: str | None = None


class Comparisons:
    """The comparisons of one kind of notes between processes, which all make in one order.

    Args:
      kind: kind of the notes, such as "batch".
    """

    def __init__(self, kind: str) -> None:
        self._kind, self._count = kind, 0
        self._topic: str | None = None

    def compare(
        self,
        note: Any,
        mesh: Mesh,
        judge: Callable[[dict[int, Any]], Verdict],
        timeout_message: str,
    ) -> None:
        """Compare the notes of all processes of a mesh; raise or warn the same on each of them.

        The first process of the mesh compares the notes, and tells the others the verdict.

        Args:
          note: the note of this process, of what JSON holds.
          mesh: mesh whose devices belong to several processes.
          judge: `judge(notes)`, called on the first process with the notes by process.
          timeout_message: warning if a process did not report in time, in which "{who}" says that.

        Raises:
          ValueError: the error of the verdict.

        Communication: one message of each process to the coordinator, and one back.
        """
        self._count += 1
        self._topic = self._topic or new_topic(self._kind, mesh)
        key = f"{self._topic}/{self._count}"
        seconds = PATIENCE_SECONDS if self._count == 1 else HINT_SECONDS
        process, *others = process_indices(mesh)
        is_first = process == jax.process_index()
        try:
            if is_first:
                notes = {process: note}
                for process in others:
                    notes[process] = json.loads(wait_for_note(f"{key}/notes/{process}", seconds))
                verdict = judge(notes)
            else:
                write_note(f"{key}/notes/{jax.process_index()}", json.dumps(note))
                verdict = Verdict(*json.loads(wait_for_note(f"{key}/verdict", seconds)))
        except NoNoteError:
            who = f"process {process} did not report within {seconds:g} s"
            verdict = Verdict(warning=timeout_message.replace("{who}", who))
        if is_first:
            write_note(f"{key}/verdict", json.dumps(verdict))
            delete_notes(f"{key}/notes")
        if verdict.error:
            raise ValueError(verdict.error)
        if verdict.warning:
            warn_user(verdict.warning)
