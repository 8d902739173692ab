"""The faults by name, each with what is promised, and one try of one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.stand import Stand

# What no fault may bring about: a state in which all processes wait.
MOST_SILENCE = 30.0
_SAID_CHARACTERS = 3000


@dataclass(frozen=True)
class Fault:
    """One of the table.

    Attributes:
      name: what is done.
      promise: what then happens.
      body: does it on a stand, and asserts that.
    """

    name: str
    promise: str
    body: Callable[[Stand], None]


@dataclass(frozen=True)
class Observed:
    """What one try showed.

    Attributes:
      broken: what was not as promised, with what the processes said; None where all was.
      seconds: from the fault to the end of the last run.
      codes: with which its commands ended.
      silence: seconds in which all trainers waited.
    """

    broken: str | None
    seconds: float | None
    codes: tuple[int, ...]
    silence: float


FAULTS: dict[str, Fault] = {}


def fault(name: str, promise: str, *given: Any) -> Callable[[Callable[..., None]], Any]:
    """Makes a function of a stand (and of `given`) a fault of the table."""

    def keep(body: Callable[..., None]) -> Callable[..., None]:
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, promise, lambda stand: body(stand, *given))
        return body

    return keep


def attempt(one: Fault, folder: Path, programs: Path, seed: int) -> Observed:
    """Tries a fault once, in a folder that is made."""
    stand, broken = Stand(folder, programs, seed), None
    try:
        with stand:
            one.body(stand)
        assert stand.silence < MOST_SILENCE, f"all waited for {stand.silence:.0f} s"
    except Exception as error:  # a try that fails in any way is to be told, and the next tried
        said = [run.err()[-_SAID_CHARACTERS:] for run in stand.runs]
        broken = "\n".join([f"{type(error).__name__}: {error}", *said])
    last = stand.runs[-1] if stand.runs else None
    return Observed(broken, last.ended if last else None, last.codes if last else (), stand.silence)
