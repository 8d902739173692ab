"""The faults by name, each with what is promised, and one try of one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.stand import Stand

_SAID_CHARACTERS = 3000


@dataclass(frozen=True)
class Named:
    """A fault of the table.

    Attributes:
      promise: what then happens.
      body: brings it about on a stand, and asserts that.
    """

    promise: str
    body: Callable[[Stand], None]


@dataclass(frozen=True)
class Observed:
    """What one try showed.

    Attributes:
      broken: what was not as promised, with what the processes said; None where all was.
      seconds: from the fault to the end of the last run.
      codes: with which its commands ended.
    """

    broken: str | None
    seconds: float | None
    codes: tuple[int, ...]


FAULTS: dict[str, Named] = {}


def fault(name: str, promise: str, *given: Any) -> Callable[[Callable[..., None]], Any]:
    """Makes a function of a stand (and of `given`) a fault of the table."""

    def keep(body: Callable[..., None]) -> Callable[..., None]:
        FAULTS[name] = Named(promise, lambda stand: body(stand, *given))
        return body

    return keep


def attempt(name: str, folder: Path, programs: Path, seed: int) -> Observed:
    """Tries a fault once, in a folder that is made."""
    stand, broken = Stand(folder, programs, seed), None
    try:
        with stand:
            FAULTS[name].body(stand)
    except Exception as error:  # a try that fails in any way is to be told, and the next tried
        said = [run.err()[-_SAID_CHARACTERS:] for run in stand.runs]
        broken = "\n".join([f"{type(error).__name__}: {error}", *said])
    last = stand.runs[-1] if stand.runs else None
    return Observed(broken, last.ended if last else None, last.codes if last else ())
