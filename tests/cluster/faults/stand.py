"""Where a fault is tried: a folder, real processes, and a watch over all of them."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from faults.watching import MARK, Process, processes
from namespaces import Host
from small_runs import LIGHT, LIGHT_FILE, quick, small_text

# A slow step over gossip, an average of its own: everything a checkpoint can hold.
TRAIN = (
    "train", "--preset", "tiny", "--replicas", "2", "--algorithm", "slowmo_sgp",
    "--slow-every", "5", "--log-every", "1", "--eval-every", "1000000", *LIGHT,
)  # fmt: skip
FOR_EVER = ("--steps", "1000000")
# Three divides no dimension of the tiny model, of which there would be a warning.
OF_THREE = {"shard_state": False}
_INJECT = Path(__file__).parent / "inject"
_START_SECONDS = 300  # on a busy machine
# By how much longer than promised something may take.
SLACK = 1.0
_GONE_SECONDS = 8
Fault = Mapping[str, Any]
"""What goes wrong inside a trainer: see `inject/sitecustomize.py`."""


class Run:
    """The processes of one command, or of one per process of a run.

    Attributes:
      commands: that were started.
      ended: seconds from `strike`, or the start, to the end of the last, once `ends` has seen it.
      codes: likewise, as a shell tells them.
    """

    def __init__(self, commands: Sequence[subprocess.Popen[str]], out: Path, said: Path) -> None:
        self.commands, self._out, self._said = commands, out, said
        self._begin = time.monotonic()
        self.ended: float | None = None
        self.codes: tuple[int, ...] = ()

    def until(self, ready: Callable[[], Any], what: str, seconds: float = _START_SECONDS) -> Any:
        """What `ready` gives, as soon as it is true of it."""
        deadline = time.monotonic() + seconds
        while not (found := ready()):
            # It may have come between the two looks.
            assert self.is_running() or ready(), f"all had ended before {what}"
            assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
            time.sleep(0.005)
        return found

    def until_step(self, step: int) -> None:
        """Waits for a record of it."""
        self.until(lambda: last_step(self._out) >= step, f"step {step}")

    def is_running(self) -> bool:
        """Whether one of the commands is."""
        return any(command.poll() is None for command in self.commands)

    def strike(self) -> None:
        """Says that the fault happens now: from here the time to the end is counted."""
        self._begin = time.monotonic()

    def ends(self, *codes: int, within: float = _START_SECONDS) -> None:
        """Waits for the end of all, with one of these codes each; a good end leaves no litter."""
        for command in self.commands:
            left = SLACK * within - (time.monotonic() - self._begin)
            try:
                command.wait(max(0.01, left))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"still running after {SLACK * within:g} s") from None
        self.ended = time.monotonic() - self._begin
        found = [128 - c if c < 0 else c for c in (p.returncode for p in self.commands)]
        self.codes = tuple(found)
        assert set(found) <= set(codes), f"ended with {found} instead of {codes}"
        if not any(found):
            assert not (self._out / "lock").exists(), "the lock is left"
            assert not is_saving(self._out), "an unfinished checkpoint is left"

    def err(self, index: int | None = None) -> str:
        """What has been written to standard error, by one of the commands or by all."""
        wanted = range(len(self.commands)) if index is None else [index]
        return "".join((self._said / f"err{i}").read_text(errors="replace") for i in wanted)

    def out(self, index: int = 0) -> str:
        """What one of the commands has printed."""
        return (self._said / f"out{index}").read_text(errors="replace")


class Stand:
    """A context in which one fault is tried once; nothing of it is left afterwards.

    Args:
      folder: for all files; made.
      programs: folder of what was compiled by earlier tries.
      seed: of what happens at random.
      hosts: on which the commands run, one each; without any on this machine.

    Attributes:
      out: folder of the runs.
      text: their data.
      settings: options of `train` that only a file sets.
      random: for moments and victims.
      runs: that were started.
    """

    def __init__(
        self, folder: Path, programs: Path, seed: int = 0, hosts: Sequence[Host] = ()
    ) -> None:
        folder.mkdir(parents=True)
        self.folder, self.out = folder, folder / "out"
        self.text = small_text(folder / "text")
        self.random = random.Random(seed)
        self.settings: dict[str, Any] = dict(LIGHT_FILE)
        self.runs: list[Run] = []
        self._hosts = hosts
        self._programs, self._mark = programs, uuid.uuid4().hex
        self._disks: list[Path] = []

    def __enter__(self) -> "Stand":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            # After an error they may well still run.
            left = [] if error is not None else self.left_after(_GONE_SECONDS)
        finally:
            for process in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            for run in self.runs:
                for command in run.commands:
                    command.wait()
            for disk in self._disks:
                subprocess.run(["umount", "--lazy", disk], check=True)
        assert not left, f"left after {_GONE_SECONDS} s: {[' '.join(p.arguments) for p in left]}"

    def launch(self, *options: str | Path, restarts: int = 0, processes: int = 2) -> Run:
        """`jaxslowmo launch` of so many processes with options of `train`."""
        head = ["launch", "--processes", str(processes), "--restarts", str(restarts), "--"]
        return self._start([[*head, *self._train(options)]])

    def train(self, *options: str | Path, fault: Fault | None = None) -> Run:
        """`jaxslowmo train` on every host, or twice, as a cluster starts it."""
        count = len(self._hosts) or 2
        place = f"{self._hosts[0].address}:9000" if self._hosts else f"127.0.0.1:{free_port()}"
        all_ = ("--coordinator", place, "--num-processes", str(count), "--replicas", str(count))
        commands = [[*self._train(options), *all_, "--process-id", str(i)] for i in range(count)]
        return self._start(commands, fault)

    def run(self, *commands: Sequence[object]) -> Run:
        """Python programs with their arguments."""
        return self._start([list(map(str, command)) for command in commands], program=())

    def disk(self, size: str) -> None:
        """Puts `out` on a disk of its own, of so many bytes (as "1500k")."""
        disk = self.folder / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
        self._disks.append(disk)
        self.out = disk / "out"

    def processes(self) -> list[Process]:
        """All of the try that live."""
        return processes(self._mark)

    def trainers(self) -> dict[int, int]:
        """The pids of those that train, by their numbers."""
        return {p.index or 0: p.pid for p in self.processes() if p.is_trainer}

    def left_after(self, seconds: float) -> list[Process]:
        """Processes that are still there after so long, and the slack."""
        deadline = time.monotonic() + SLACK * seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _train(self, options: Sequence[str | Path]) -> list[str]:
        file = self.folder / "options.json"
        file.write_text(json.dumps(self.settings))
        # Of an option that is given twice the last counts.
        own = ("--config", file, "--data", self.text, "--out", self.out)
        return [*map(str, (*TRAIN, *own, *options))]

    def _start(
        self,
        commands: Sequence[Sequence[str]],
        fault: Fault | None = None,
        program: Sequence[str] = ("-m", "jaxslowmo"),
    ) -> Run:
        said = self.folder / f"said{len(self.runs)}"
        said.mkdir()
        env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        env |= {MARK: self._mark, **quick(self._programs)}
        if fault is not None:
            env["JAXSLOWMO_TEST_FAULT"] = json.dumps(dict(fault))
            paths = [str(_INJECT), *filter(None, [env.get("PYTHONPATH")])]
            env["PYTHONPATH"] = os.pathsep.join(paths)
        started: list[subprocess.Popen[str]] = []
        run = Run(started, self.out, said)
        self.runs.append(run)
        for index, command in enumerate(commands):
            # `ip netns exec` becomes the command, so the process is the command's own.
            where = self._hosts[index].command if self._hosts else []
            with (said / f"out{index}").open("w") as out, (said / f"err{index}").open("w") as err:
                started.append(
                    subprocess.Popen(
                        [*where, sys.executable, *program, *command],
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        env=env,
                        text=True,
                        # Ctrl-C is for this suite, which then ends these.
                        start_new_session=True,
                    )
                )
        return run


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def records(out: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl; none while it is not there, and without a line that is being written."""
    try:
        lines = (out / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def last_step(out: Path) -> int:
    """The last that is recorded; 0 without any."""
    try:
        return max((record["step"] for record in records(out)), default=0)
    except json.JSONDecodeError:
        return 0


def steps_saved(out: Path) -> list[int]:
    """Steps of the complete checkpoints."""
    folder = out / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return sorted(int(name) for name in names if re.fullmatch(r"[1-9][0-9]{0,7}", name))


def is_saving(out: Path) -> bool:
    """Whether a checkpoint is being written."""
    folder = out / "checkpoints"
    return folder.exists() and any("tmp" in path.name for path in folder.iterdir())
