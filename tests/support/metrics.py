"""The recorded metrics of a run, for comparison with another run."""

import json
from pathlib import Path
from typing import Any


def trajectory(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without values of the clock and notes of resumptions."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key != "tokens_per_second"}
        for line in lines
        if "resumed" not in line
    ]
