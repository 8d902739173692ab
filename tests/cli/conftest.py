"""`call("train --steps 5 --out", folder)`, and text to train on."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from cli.commands import run, write_text


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        """Cells of the lines of tables that rich has drawn."""
        lines = [line.strip("│ ") for line in self.out.splitlines() if line.startswith("│")]
        return [[part.strip() for part in line.split("│")] for line in lines]

    def is_refused(self, *parts: object) -> None:
        """Fail unless all that was said is one line on stderr with these parts, and the code 2."""
        assert (self.code, self.out, self.err.count("\n")) == (2, "", 1), self
        assert self.err.startswith("error: ")
        assert [part for part in parts if str(part) not in self.err] == [], self.err


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Outcome]:
    monkeypatch.chdir(tmp_path)  # without --out it makes a folder where it stands
    monkeypatch.setenv("COLUMNS", "100")

    def called(*parts: object) -> Outcome:
        code = run(*parts)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return called


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, not to be changed."""
    return write_text(tmp_path_factory.mktemp("texts") / "text")
