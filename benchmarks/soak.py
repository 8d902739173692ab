"""Whether memory, descriptors or threads of a run grow: two processes that save every 20 steps.

    python benchmarks/soak.py --minutes 25 --out benchmarks/results/soak.md

Looks at every process every ten seconds. Slopes are least squares over the looks after the first
two minutes, in which pools and caches fill.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from machine import describe

sys.path.append(str(Path(__file__).parents[1] / "tests" / "cluster"))
from faults.watching import MARK, Process, processes
from small_runs import small_text

SAVE_EVERY = 20
LOOK_SECONDS = 10
SETTLE_SECONDS = 120
TRAIN = (
    "train", "--preset", "tiny", "--replicas", "2", "--algorithm", "slowmo_sgp", "--slow-every",
    "5", "--steps", "100000000", "--log-every", "1", "--eval-every", "100000000",
    "--checkpoint-every", str(SAVE_EVERY),
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    """One look at one process.

    Attributes:
      seconds: since the start.
      step: of the run.
      kib: resident memory.
      descriptors: that are open.
      threads: of the process.
    """

    seconds: float
    step: int
    kib: int
    descriptors: int
    threads: int


QUANTITIES: dict[str, tuple[str, Callable[[Look], float]]] = {
    "memory": ("MiB", lambda look: look.kib / 1024),
    "descriptors": ("", lambda look: look.descriptors),
    "threads": ("", lambda look: look.threads),
}


def name_of(process: Process) -> str:
    if process.index is None:
        return "launcher"
    return f"{'trainer' if process.is_trainer else 'parent of'} {process.index}"


def look_at(process: Process, seconds: float, step: int) -> Look:
    folder = Path(f"/proc/{process.pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    descriptors = len(list((folder / "fd").iterdir()))
    return Look(seconds, step, int(status["VmRSS"].split()[0]), descriptors, int(status["Threads"]))


def last_step(out: Path) -> int:
    """Of metrics.jsonl, from the end: it grows long."""
    with (out / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = file.read().split(b"\n")
    return json.loads(lines[-2])["step"]


def measure(minutes: float, folder: Path) -> dict[str, list[Look]]:
    """The looks at every process of a run, by its name."""
    mark, out = f"soak-{os.getpid()}", folder / "out"
    text = small_text(folder / "text")
    head = (sys.executable, "-m", "jaxslowmo", "launch", "--processes", "2", "--")
    begin, looks = time.monotonic(), {}
    run = subprocess.Popen(
        [*head, *TRAIN, "--data", text, "--out", out],
        stdout=subprocess.DEVNULL,
        env={**os.environ, MARK: mark},
    )
    try:
        while time.monotonic() - begin < 60 * minutes:
            time.sleep(LOOK_SECONDS)
            if run.poll() is not None:
                raise RuntimeError(f"the run ended with code {run.returncode}")
            if not (out / "metrics.jsonl").exists():
                continue
            step, seconds = last_step(out), time.monotonic() - begin
            for process in processes(mark):
                looks.setdefault(name_of(process), []).append(look_at(process, seconds, step))
        run.send_signal(signal.SIGTERM)
        if code := run.wait(120):
            raise RuntimeError(f"after SIGTERM the run ended with code {code}")
    finally:
        for process in processes(mark):
            os.kill(process.pid, signal.SIGKILL)
        run.wait()
    return looks


def slope(looks: Sequence[Look], value: Callable[[Look], float]) -> float:
    """Per 1000 steps."""
    steps = np.array([look.step for look in looks]) / 1000
    return float(np.polyfit(steps, [value(look) for look in looks], 1)[0])


def markdown(looks: dict[str, list[Look]], command: str, loads: Sequence[float]) -> str:
    machine = describe()
    settled = {
        name: [look for look in found if look.seconds > SETTLE_SECONDS] or found
        for name, found in looks.items()
    }
    first, last = (next(iter(settled.values()))[i] for i in (0, -1))
    steps, minutes = last.step - first.step, (last.seconds - first.seconds) / 60
    lines = [
        "# Soak",
        "",
        f"`{command}`: `jaxslowmo launch --processes 2 -- {' '.join(TRAIN)}`; "
        f"{machine['processor']}, {machine['cores']} cores, {machine['devices'].split()[2]}, jax "
        f"{machine['jax']}. Load averages (1 minute) before and after: "
        f"{' and '.join(f'{load:.1f}' for load in loads)}.",
        "",
        f"{last.step} steps, {last.step // SAVE_EVERY} saves. Slopes are least squares over the "
        f"last {minutes:.1f} minutes, {steps} steps and {steps // SAVE_EVERY} saves, with a look "
        f"every {LOOK_SECONDS} s.",
        "",
        "| process | | begin | end | per 1000 steps | in the second half | per save |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, found in sorted(settled.items(), reverse=True):  # trainers first
        for quantity, (unit, value) in QUANTITIES.items():
            rate, late = slope(found, value), slope(found[len(found) // 2 :], value)
            per_save = f"{1024 * rate * SAVE_EVERY / 1000:.1f} KiB" if unit else ""
            lines.append(
                f"| {name} | {quantity} | {value(found[0]):.4g} {unit} | {value(found[-1]):.4g} "
                f"{unit} | {rate:.3f} {unit} | {late:.3f} {unit} | {per_save} |"
            )
    return "\n".join(lines).replace("  |", " |") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--out", type=Path, help="a file for the table, which is printed as well")
    given = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        looks = measure(given.minutes, Path(folder))
    command = f"benchmarks/soak.py --minutes {given.minutes:g}"
    text = markdown(looks, command, (before, os.getloadavg()[0]))
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
