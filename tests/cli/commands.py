"""The command line in this process, and the files that a run leaves."""

import json
import shlex
from pathlib import Path
from typing import Any

from jaxslowmo.cli import main

# SGD compiles faster than AdamW, and most of these tests' time is compilation.
TINY = "train --preset tiny --eval-batches 1 --batch 2 --optimizer sgd --clip 0"


def run(*parts: Any) -> int:
    """Run the command line of these texts, split as a shell does; return its exit code."""
    try:
        main(shlex.split(" ".join(map(str, parts))))
    except SystemExit as exit:
        return int(exit.code or 0)
    return 0


def write_text(folder: Path) -> Path:
    """Write text for up to nine replicas; return its folder."""
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"File {i} says hello to the world.\n" * 40)
    return folder


def records(out: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def trajectory(out: Path) -> list[dict[str, Any]]:
    """Return them without values of the clock and notes of resumptions."""
    lines = [line for line in records(out) if "resumed" not in line]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def json_of(path: Path) -> Any:
    """Return what a file of JSON holds."""
    return json.loads(path.read_text())
