"""What the processes tell each other of batches that differ in size."""

import contextlib
import json

import jax
import numpy as np
from jax.sharding import Mesh

from .._coordinator import NoNoteError, forget, gather_notes
from .batches import processes_of, topic_of

# A loader may take its time before a first batch.
PATIENCE_SECONDS = 1800.0


class Others:
    """The processes of a mesh, asked before every batch.

    By notes: an exchange of devices would wait for all steps that were started before.

    Args:
      owner: public name, for messages.
      mesh: of several processes, which make these objects in one order.
    """

    def __init__(self, owner: str, mesh: Mesh) -> None:
        self._owner, self._processes = owner, processes_of(mesh)
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
                    f"{self._owner}: `shares` of process {process} ended in an error: {note}"
                )
        return np.array(notes, np.int32)

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
                f"{self._owner}: another process has not given batch {self._batches} for "
                f"{PATIENCE_SECONDS:g} s."
            ) from error
        if jax.process_index() == self._processes[0]:
            # Who has told of this batch has read what was told of the last one.
            forget(f"{self._topic}/{self._batches - 1}")
        return notes
