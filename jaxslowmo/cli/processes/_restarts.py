"""When a run starts again after a failure, how often, and with which arguments. No jax."""

import contextlib
import dataclasses
from collections.abc import Sequence

from .._errors import FINAL
from ..run._run_folder import RunFolder

_FIRST_WAIT, _LONGEST_WAIT = 1, 60  # seconds
# A run that has failed this often at one step will fail there again.
_MOST_AT_ONE_STEP = 5
_OVERWRITE, _RESUME = "--overwrite", "--resume"


@dataclasses.dataclass(frozen=True)
class EndOfStart:
    """The way in which one start of a run ended.

    Attributes:
      code: the exit code; 128 + n after signal n.
      what: what happened, in words.
      is_reported: whether the process has printed the reason itself.
      is_late: whether the reason is that not all processes joined in time.
    """

    code: int
    what: str
    is_reported: bool = False
    is_late: bool = False

    @property
    def is_final(self) -> bool:
        """True if another start would end in the same way, or is not wanted."""
        return self.code in FINAL


class Restarts:
    """The decisions whether and when a run starts again, from its failures so far."""

    def __init__(self, folder: RunFolder, most: int) -> None:
        self._folder, self._most = folder, most
        self._left, self._wait = most, _FIRST_WAIT
        self._saved = folder.newest_step()
        self._place: int | None = None
        self._at_place = 0
        # Checkpoints of an earlier run in the folder, which --overwrite deletes.
        self._old = _checkpoint_ids(folder)

    def after(self, ended: EndOfStart) -> tuple[int | None, str]:
        """Return the seconds until the next start (None: no start), and words for the user."""
        if ended.is_final:
            return None, ""
        earlier, self._saved = self._saved, self._folder.newest_step()
        if self._saved is not None and (earlier is None or self._saved > earlier):
            self._left, self._wait = self._most, _FIRST_WAIT
        if not ended.is_late:
            place = self._folder.last_recorded()
            place = self._saved if place is None else place
            self._at_place = self._at_place + 1 if place == self._place else 1
            self._place = place
        if not self._left:
            return None, "no restarts left" if self._most else ""
        if self._at_place >= _MOST_AT_ONE_STEP:
            where = "before the first step" if self._place is None else f"at step {self._place}"
            return None, f"not started again after {_MOST_AT_ONE_STEP} failures in a row {where}"
        wait, self._wait = self._wait, min(2 * self._wait, _LONGEST_WAIT)
        self._left -= 1
        return wait, f"starting again in {wait} s (restarts left: {self._left})"

    def resuming(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments of a start that goes on from the last checkpoint."""
        if _OVERWRITE in arguments and self._old & _checkpoint_ids(self._folder):
            # The run failed before it had deleted the old run, which must not be resumed.
            return [*arguments]
        return [x for x in arguments if x not in (_OVERWRITE, _RESUME)] + [_RESUME]


def _checkpoint_ids(folder: RunFolder) -> set[tuple[int, int]]:
    """Return ids of the checkpoints, which differ for one that replaces another."""
    ids = set()
    for step in folder.saved_steps():
        with contextlib.suppress(OSError):
            status = (folder.checkpoints / str(step)).stat()
            ids.add((status.st_ino, status.st_mtime_ns))
    return ids
