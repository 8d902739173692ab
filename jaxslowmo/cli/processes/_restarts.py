"""Starting a run again after a failure: when, how often, and from where; without jax."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .._errors import FINAL, INTERRUPTED, TERMINATED
from ._children import Children

_FIRST_WAIT, _LONGEST_WAIT = 1, 60  # seconds
# What has failed so often at one step will fail there again.
_MOST_AT_ONE_STEP = 5
# Checkpoints are called so: `int` would take other names for numbers, too.
_STEP = re.compile(r"0|[1-9][0-9]{0,9}")
_STEPS_END = 2**31
# The end of metrics.jsonl that is read: more than its longest line.
_TAIL_BYTES = 2**16
_OVERWRITE, _RESUME = "--overwrite", "--resume"


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a start ended.

    Attributes:
      code: the exit code; 128 + n after signal n.
      what: what happened, in words.
      is_told: whether the process that ended has said so itself.
      is_late: whether the reason is that not all processes came together in time.
    """

    code: int
    what: str
    is_told: bool = False
    is_late: bool = False

    @property
    def is_final(self) -> bool:
        """Whether a start after it would end alike, or is not wanted."""
        return self.code in FINAL


def keep_running(
    attempt: Callable[[Children, list[str]], Ended],
    argv: Sequence[str],
    out: Path,
    *,
    restarts: int,
    speaker: str,
) -> int:
    """Starts a run, and again, with `--resume`, after failures that can pass.

    Between two starts it waits 1, 2, 4, ... 60 s. It gives up after `restarts` starts without a
    newer checkpoint, and after five failures in a row at one step. SIGTERM and Ctrl-C end it at any
    time.

    Args:
      attempt: `attempt(children, arguments)` starts what there is to start and waits for its end.
      argv: arguments of the first start.
      out: folder of the run.
      restarts: how often to start again before there is a newer checkpoint.
      speaker: with what lines on stderr begin.

    Returns:
      The code of the last start; 130 after Ctrl-C; after SIGTERM 0 where all was saved, the code
      of an error that came of itself, else 143.
    """

    def say(*parts: str) -> None:
        # In one piece: other processes write there, too.
        pass_on(f"{speaker}: {'; '.join(filter(None, parts))}\n")

    arguments, again, ended = list(argv), _Restarts(out, restarts), None
    with Children() as children:
        while children.asked is None:
            ended = attempt(children, arguments)
            if children.asked is not None:
                break
            if ended.is_final and ended.is_told:
                return ended.code
            wait, plan = again.after(ended)
            if plan or not ended.is_told:
                say(ended.what, last_saved(out), plan)
            if wait is None:
                return ended.code
            ended = None
            children.pause(wait)
            arguments = again.resuming(arguments)
        if children.asked == signal.SIGINT:
            return INTERRUPTED
        if ended is not None and ended.is_final and ended.is_told:
            return ended.code
        say("ended by SIGTERM", last_saved(out))
        return TERMINATED


class _Restarts:
    """How often and when a run is started again."""

    def __init__(self, out: Path, most: int) -> None:
        self._out, self._most = out, most
        self._left, self._wait = most, _FIRST_WAIT
        self._saved = _newest_checkpoint(out)
        self._place: int | None = None
        self._at_place = 0
        # Of a run that lay there before: they are to be deleted with --overwrite.
        self._old = _checkpoint_ids(out)

    def after(self, ended: Ended) -> tuple[int | None, str]:
        """Seconds until the next start, None if there is none, and what to say of it."""
        if ended.is_final:
            return None, ""
        before, self._saved = self._saved, _newest_checkpoint(self._out)
        if self._saved is not None and (before is None or self._saved > before):
            self._left, self._wait = self._most, _FIRST_WAIT
        if not ended.is_late:
            place = _last_recorded(self._out)
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
        """The arguments of a start that goes on from the last checkpoint."""
        if _OVERWRITE in arguments:
            # It failed before it had deleted the old run, which nobody wants to go on with.
            if self._old & _checkpoint_ids(self._out):
                return list(arguments)
            arguments = [argument for argument in arguments if argument != _OVERWRITE]
        return [*arguments, *([] if _RESUME in arguments else [_RESUME])]


def pass_on(text: str) -> None:
    """Writes to stderr at once; that nobody reads it any more ends no run."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def last_saved(out: Path) -> str:
    """Which step a run that starts again would go on from, in words."""
    step, folder = _newest_checkpoint(out), out / "checkpoints"
    if step is None:
        return f"no checkpoint in {folder}"
    return f"the last saved step is {step}, in {folder}"


def _newest_checkpoint(out: Path) -> int | None:
    return max(saved_steps(out), default=None)


def saved_steps(out: Path) -> list[int]:
    """Steps of the complete checkpoints of a run, in any order."""
    try:
        names = os.listdir(out / "checkpoints")
    except OSError:
        return []
    steps = [int(name) for name in names if _STEP.fullmatch(name)]
    return [step for step in steps if step < _STEPS_END]


def _checkpoint_ids(out: Path) -> set[tuple[int, int, int]]:
    """What tells a checkpoint from one that is written in its place."""
    found = set()
    for step in saved_steps(out):
        try:
            status = (out / "checkpoints" / str(step)).stat()
        except OSError:
            continue
        found.add((step, status.st_ino, status.st_mtime_ns))
    return found


def _last_recorded(out: Path) -> int | None:
    """The last step in metrics.jsonl; None where there is none."""
    try:
        with (out / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            # Cut off, or damaged.
            continue
        if isinstance(step, int):
            return step
    return None
