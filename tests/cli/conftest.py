"""The command line in this process, with a tiny preset."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxslowmo.cli import main
from jaxslowmo.models import GPT_PRESETS


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        """Cells of the lines of tables that rich has drawn."""
        lines = [line.strip("│ ") for line in self.out.splitlines() if line.startswith("│")]
        return [[part.strip() for part in line.split("│")] for line in lines]


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Outcome]:
    """`call("train", "--steps", 5)`: runs the command line here, with a tiny demo preset."""
    monkeypatch.chdir(tmp_path)  # without --out it makes a folder where it stands
    monkeypatch.setitem(GPT_PRESETS, "demo", GPT_PRESETS["tiny"])
    monkeypatch.setenv("COLUMNS", "100")

    def run(*argv: Any) -> Outcome:
        code = 0
        try:
            main([str(argument) for argument in argv])
        except SystemExit as exit:
            code = int(exit.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder with text for four replicas."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"File {i} says hello to the world.\n" * 40)
    return folder
