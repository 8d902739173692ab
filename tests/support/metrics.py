"""What a run has recorded, to be compared with what another has."""

import json
from pathlib import Path
from typing import Any


def trajectory(folder: Path) -> list[dict[str, Any]]:
    """All of metrics.jsonl that does not depend on the clock, without notes of resumptions."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key != "tokens_per_second"}
        for line in lines
        if "resumed" not in line
    ]
