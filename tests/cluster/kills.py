"""Kills processes of a run again and again, and compares what it leaves with an undisturbed run.

    python tests/cluster/kills.py 50

Every start of the run loses one of its processes to SIGKILL: a trainer or the parent that
supervises it, at a random moment, every third time while a checkpoint is being written.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from small_runs import LIGHT, quick, small_text

PROCESSES = 4
# A slow step over gossip, an average of its own: everything a checkpoint can hold.
TRAIN = (
    "train", "--preset", "tiny", "--replicas", str(PROCESSES), "--algorithm", "slowmo_sgp",
    "--slow-every", "5", "--checkpoint-every", "4", "--log-every", "1", "--eval-every", "1000",
    *LIGHT,
)  # fmt: skip
STEPS_PER_KILL = 6


@dataclass(frozen=True)
class Kill:
    """One that happened.

    Attributes:
      step: the last one recorded before it.
      victim: "trainer 2", "parent of 0".
      while_saving: whether a checkpoint was being written.
    """

    step: int
    victim: str
    while_saving: bool


def launch(out: Path, text: Path, kills: int, restarts: int) -> subprocess.Popen:
    """The run, with enough steps for that many kills."""
    with (out.parent / f"{out.name}.err").open("w") as err:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "jaxslowmo", "launch", "--processes", str(PROCESSES)),
                *("--restarts", str(restarts), "--heartbeat-timeout", "2", "--", *TRAIN),
                *("--steps", str(STEPS_PER_KILL * (kills + 1)), "--data", text, "--out", out),
            ],
            stdout=subprocess.DEVNULL,
            stderr=err,
            env=os.environ | quick(out.parent / "programs"),
        )


def disturb(run: subprocess.Popen, out: Path, kills: int, seed: int) -> Iterator[Kill]:
    """Kills one process of every start of the run."""
    random_ = random.Random(seed)
    for number in range(kills):
        begun, last = _last_step(out), STEPS_PER_KILL * (kills + 1)
        # Never so late that the run could end before.
        wanted = min(begun + random_.randint(1, STEPS_PER_KILL), last - 2)
        saving = number % 3 == 2
        trainers = _wait(run, lambda: _trainers(run.pid), "its processes")
        _wait(run, lambda step=wanted: _last_step(out) >= step, f"step {wanted}")
        if saving:
            _wait(run, lambda: _is_saving(out), "a checkpoint")
        else:
            time.sleep(random_.uniform(0, 0.05))
        index = random_.randrange(PROCESSES)
        parent, trainer = trainers[index]
        is_parent = random_.random() < 0.25
        os.kill(parent if is_parent else trainer, signal.SIGKILL)
        yield Kill(_last_step(out), f"{'parent of' if is_parent else 'trainer'} {index}", saving)
        _wait(run, lambda gone=trainers: _trainers(run.pid) not in (None, gone), "a new start")


def trajectory(out: Path) -> list[dict]:
    """What metrics.jsonl says of every step, without the clock and notes of resumptions."""
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in line.items() if key != "tokens_per_second"}
        for line in lines
        if "resumed" not in line
    ]


def _wait(run: subprocess.Popen, ready, what: str):
    deadline = time.monotonic() + 300
    while not (found := ready()):
        if run.poll() is not None:
            raise RuntimeError(f"the run ended with code {run.returncode} before {what}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {what} within 300 s")
        time.sleep(0.002)
    return found


def _trainers(launcher: int) -> list[tuple[int, int]] | None:
    """(parent, trainer) of every process; None until all are there."""
    pairs = [(parent, child) for parent in _children(launcher) for child in _children(parent)]
    return pairs if len(pairs) == PROCESSES else None


def _children(pid: int) -> list[int]:
    try:
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except (FileNotFoundError, ProcessLookupError):
        return []


def _last_step(out: Path) -> int:
    try:
        lines = (out / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line)["step"] for line in lines), default=0)
    except (FileNotFoundError, json.JSONDecodeError):
        return 0


def _is_saving(out: Path) -> bool:
    """Whether there is a checkpoint that has not its name yet."""
    folder = out / "checkpoints"
    return folder.exists() and any(not path.name.isdigit() for path in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kills", type=int, nargs="?", default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        compare(Path(folder), given.kills, given.seed, report=print)


def compare(folder: Path, kills: int, seed: int, report=lambda kill: None) -> list[Kill]:
    """Runs undisturbed and disturbed.

    Raises:
      AssertionError: the trajectories differ in a bit.
    """
    text = small_text(folder / "text")
    calm, out = folder / "calm", folder / "disturbed"
    assert launch(calm, text, kills, 0).wait(300) == 0, (folder / "calm.err").read_text()
    run = launch(out, text, kills, kills)
    try:
        found = []
        for kill in disturb(run, out, kills, seed):
            report(kill)
            found.append(kill)
        assert run.wait(300) == 0, (folder / "disturbed.err").read_text()
    finally:
        run.send_signal(signal.SIGINT)
        try:
            run.wait(120)
        except subprocess.TimeoutExpired:
            run.kill()
    said = (folder / "disturbed.err").read_text().splitlines()
    assert sum(line.startswith("launch: process ") for line in said) == kills, said
    # A line of every survivor, of a trainer's parent, and nothing else.
    assert all(line.startswith(("launch: process ", "error: ")) for line in said), said
    assert trajectory(out) == trajectory(calm)
    assert trajectory(out)[-1]["step"] == STEPS_PER_KILL * (kills + 1)
    return found


if __name__ == "__main__":
    main()
