"""What an earlier run left in a folder: told to who would start another there, or deleted."""

import contextlib
import json
import re
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..._support.files import is_unfinished
from .._errors import CommandError
from ..processes._restarts import saved_steps
from ._alike import CORPUS

# Each of them tells that there was a run, or a comparison of some.
_SIGNS = ("config.json", "metrics.jsonl", "summary.json", "compare.json")
_FILES = frozenset({*_SIGNS, CORPUS, "statistics.json", "compare.png"})
_LOCK_OF_THE_PAST = re.compile(r"lock\.[0-9a-f]+")
_CHECKPOINT = re.compile(r"\d+(\..+)?")  # with an ending: set aside, or not complete
_LOG = re.compile(r"process-\d+\.txt")
_EVENTS = re.compile(r"events\.out\.tfevents\..+")
_RUN_OF_A_COMPARISON = re.compile(r".+-seed\d+")


def refuse_leftovers(folder: Path, *, may_resume: bool, resumes: bool = False) -> None:
    """Ends a start in a folder that holds what the command does not go on with.

    Args:
      folder: of the results; may be missing.
      may_resume: whether the command can go on with a run. With a comparison none can.
      resumes: whether it does.

    Raises:
      CommandError: what lies there, and what can be done.
    """
    can_go_on = may_resume and not _is_comparison(folder) and not _has_nothing_left(folder)
    found = None if can_go_on and resumes else describe_leftovers(folder)
    if found:
        resume = "--resume to go on with it, " if can_go_on else ""
        raise CommandError(
            f"--out {folder} holds {found}: give {resume}another folder, or --overwrite to delete "
            "it first"
        )


def describe_leftovers(folder: Path) -> str | None:
    """The run or the comparison that a folder holds, in words; None where there is none."""
    num_checkpoints = len(saved_steps(folder))
    if not num_checkpoints and not any((folder / name).exists() for name in _SIGNS):
        return None
    config, summary = _facts(folder / "config.json"), _facts(folder / "summary.json")
    if _is_comparison(folder):
        state = "finished" if (folder / "compare.json").exists() else "not finished"
        return f"a comparison of {_list(config.get('algorithms'))} ({state})"
    of = _of(config.get("algorithm"), "algorithm") or summary.get("algorithm") or "an algorithm"
    counted = "no checkpoint" if not num_checkpoints else f"{num_checkpoints} checkpoints"
    counted = "1 checkpoint" if num_checkpoints == 1 else counted
    status = summary.get("status") or "not finished"
    return f"a run of {of} (last step {_last_step(folder, summary)}, {status}, {counted})"


def _has_nothing_left(folder: Path) -> bool:
    """Whether a run is finished and kept nothing to go on from: a start would be another run."""
    summary = _facts(folder / "summary.json")
    return summary.get("status") == "finished" and not saved_steps(folder)


def _is_comparison(folder: Path) -> bool:
    return "algorithms" in _facts(folder / "config.json") or (folder / "compare.json").exists()


def sweep(folder: Path, *, keep: Collection[str] = ()) -> None:
    """Deletes what an earlier run or comparison left, and nothing else. The lock stays.

    Args:
      folder: of the results.
      keep: names of files that this run has written.
    """
    # The checkpoints first: a sweep that is killed must leave what tells of a run to the last.
    _sweep_folder(folder / "checkpoints", _CHECKPOINT)
    model = folder / "model"
    if (model / "record").is_dir() and (model / "state").is_dir():
        shutil.rmtree(model)
    _sweep_folder(folder / "logs", _LOG)
    _sweep_folder(folder / "tensorboard", _EVENTS)
    # Elsewhere a folder of such a name is a run of its own.
    for path in sorted(folder.iterdir()) if _is_comparison(folder) else ():
        if path.is_dir() and _RUN_OF_A_COMPARISON.fullmatch(path.name):
            sweep(path)
            with contextlib.suppress(OSError):  # it holds something else, too
                path.rmdir()
    for path in sorted(folder.iterdir()):
        old = path.name in _FILES or _LOCK_OF_THE_PAST.fullmatch(path.name)
        if (old and path.name not in keep) or is_unfinished(path):
            path.unlink()


def _sweep_folder(folder: Path, ours: re.Pattern[str]) -> None:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if not ours.fullmatch(path.name):
            continue
        if path.is_dir():
            # What is deleted by half when this is killed must not be taken for a checkpoint.
            shutil.rmtree(path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex}")))
        else:
            path.unlink()
    with contextlib.suppress(OSError):  # it holds something else, too
        folder.rmdir()


def _facts(path: Path) -> dict[str, Any]:
    """A file of JSON that may be missing or damaged."""
    try:
        facts = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _last_step(folder: Path, summary: dict[str, Any]) -> Any:
    if "steps" in summary:
        return summary["steps"]
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError, TypeError):
        # The last line may have been cut off.
        *_, last, _ = (folder / "metrics.jsonl").read_bytes().split(b"\n")
        return json.loads(last)["step"]
    return "unknown"


def _of(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _list(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "algorithms"
