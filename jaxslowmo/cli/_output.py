"""Where results go: a folder, metrics as JSON lines, and configurations as JSON."""

import dataclasses
import datetime
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ._errors import CommandError


def make_folder(out: Path | None, command: str) -> Path:
    """The folder for results, made if need be; by default runs/COMMAND-DATE.

    Raises:
        CommandError: if it cannot be made or written to.
    """
    if out is None:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        out = Path("runs") / f"{command}-{now}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):  # several processes may try at once
            pass
    except OSError as error:
        raise CommandError(f"--out must be a folder to write to, {out}: {error.strerror}") from None
    return out


def write_json(path: Path, value: Any) -> None:
    """Writes a configuration (dataclass) or a summary (dict); NaN becomes null."""
    plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # pyright: ignore[reportArgumentType]
    path.write_text(json.dumps(_finite(plain), indent=2, default=str) + "\n", encoding="utf-8")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; of a last line that was cut off nothing."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


class JsonLines:
    """A file with one JSON object per line, each on disk as soon as it is written.

    Args:
        path: of the file; what it held is replaced.
        records: to begin with.
    """

    def __init__(self, path: Path, records: Sequence[dict[str, Any]] = ()):
        self._file = path.open("w", encoding="utf-8")
        for record in records:
            self.write(record)

    def write(self, record: dict[str, Any]) -> None:
        """Appends a line; NaN and infinities, which JSON lacks, become null."""
        self._file.write(json.dumps(_finite(record)) + "\n")
        self._file.flush()

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
