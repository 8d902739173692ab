"""What a program packs into which buffers, told to whoever listens while it is traced."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from ._plan import BufferPlan


@dataclass(frozen=True)
class BufferNote:
    """One flat buffer.

    Attributes:
      role: what it is exchanged for: `"gradients"`; of parameters `"average"`, `"slow"`, `"round"`.
      dtype: its element type, by its jax name.
      size_bytes: its size on one device.
      leaves: names of the leaves in it, in order; parts of one leaf repeat its name.
    """

    role: str
    dtype: str
    size_bytes: int
    leaves: tuple[str, ...]


# An ordered set of the plans met: a program may be traced, and a plan packed, more than once.
_Notes = dict[tuple[BufferNote, ...], None]
_listening: ContextVar[_Notes | None] = ContextVar("jaxslowmo_buffer_notes", default=None)


@contextlib.contextmanager
def noted_buffers() -> Iterator[list[BufferNote]]:
    """Collects, until its end, the buffers of all programs that are traced meanwhile.

    Yields:
      A list, filled when the context ends.
    """
    found: list[BufferNote] = []
    notes: _Notes = {}
    token = _listening.set(notes)
    try:
        yield found
    finally:
        _listening.reset(token)
        found += [note for plan in notes for note in plan]


def note_buffers(role: str, plan: BufferPlan, names: Sequence[str]) -> None:
    """At trace time: tell who listens, if anybody does, what `plan` packs."""
    notes = _listening.get()
    if notes is None:
        return
    key = tuple(
        BufferNote(
            role, buffer.dtype.name, buffer.size_bytes, tuple(names[i] for i in buffer.leaves)
        )
        for buffer in plan.buffers
    )
    notes[key] = None
