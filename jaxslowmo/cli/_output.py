"""Where results go: a folder, values as JSON, sentences on the terminal."""

import contextlib
import dataclasses
import datetime
import itertools
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from .._support.files import PASSING, write_anew
from ._errors import TRY_AGAIN, USAGE_ERROR, CommandError


def make_folder(out: Path | None, command: str) -> Path:
    """The folder for results, made if need be; by default runs/COMMAND-DATE, a new one.

    Raises:
      CommandError: if it cannot be made or written to; with code 75 if a disk is full or a file
        server does not answer.
    """
    out = _new_folder(command) if out is None else out
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):  # several processes may try at once
            pass
    return out


def _new_folder(command: str) -> Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    first = Path("runs") / f"{command}-{now}"
    with writing_to(first):
        first.parent.mkdir(exist_ok=True)
        out, others = first, itertools.count(2)
        while True:
            try:
                out.mkdir()
            except FileExistsError:  # scripts start several runs within one second
                out = first.with_name(f"{first.name}-{next(others)}")
            else:
                return out


@contextlib.contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Turns an `OSError` about the folder into a `CommandError` that names it."""
    try:
        yield
    except OSError as error:
        code = TRY_AGAIN if error.errno in PASSING else USAGE_ERROR
        what = f"--out must be a folder to write to, {out}: {error.strerror}"
        raise CommandError(what, code) from None


def write_json(path: Path, value: Any) -> None:
    """Writes a configuration (dataclass) or a summary (dict); NaN becomes null."""
    plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # pyright: ignore[reportArgumentType]
    write_anew(path, json.dumps(_finite(plain), indent=2, default=str) + "\n")


def json_line(record: dict[str, Any]) -> str:
    """One line; NaN and infinities, which JSON lacks, become null."""
    return json.dumps(_finite(record)) + "\n"


def say(console: Console, *sentences: str) -> None:
    """Prints each on a line of its own, as it is: not coloured, and wrapped by the terminal."""
    for sentence in sentences:
        console.print(sentence, highlight=False, soft_wrap=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
