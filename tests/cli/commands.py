"""The command line in this process, and the files that a run leaves."""

import json
import shlex
import struct
import tempfile
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from jaxslowmo.cli import main

# SGD compiles faster than AdamW, and most of these tests' time is compilation.
QUICK = {"eval_batches": 1, "clip": 0.0}
TINY = "train --preset tiny --batch 2 --optimizer sgd"


def words(*parts: Any) -> list[str]:
    """Return texts, split as a shell does; dicts become one file of `--config`."""
    texts = [part for part in parts if not isinstance(part, dict)]
    found = shlex.split(" ".join(map(str, texts)))
    if values := {name: x for part in parts if isinstance(part, dict) for name, x in part.items()}:
        path = Path(tempfile.mkdtemp()) / "options.json"
        path.write_text(json.dumps(values))
        found[1:1] = ["--config", str(path)]
    return found


def run(*parts: Any) -> int:
    """Run the command line of these parts; return its exit code."""
    try:
        main(words(*parts))
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


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """Return the values by step of each tag of TensorBoard; what a later start did anew counts.

    Events are read back as TensorBoard does, their checksums compared.
    """
    found: dict[str, dict[int, float]] = {}
    for path in sorted((folder / "tensorboard").iterdir()):
        rest = path.read_bytes()
        while rest:
            (size,) = struct.unpack("<Q", rest[:8])
            data = rest[12 : 12 + size]
            checks = struct.unpack("<I", rest[8:12]) + struct.unpack("<I", rest[12 + size :][:4])
            assert checks == (masked_crc32c(rest[:8]), masked_crc32c(data))
            event, rest = Event.FromString(data), rest[16 + size :]
            if event.session_log.status == SessionLog.START:
                found = {
                    tag: {step: x for step, x in curve.items() if step < event.step}
                    for tag, curve in found.items()
                }
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found
