"""Islands as processes that are killed at chosen moments and start again.

Only the standard library: the driver is on no host. Each process writes what it does, see
`programs/island.py`, and a thread per process reads it: so kills hit a moment within milliseconds.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from namespaces import Host

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PROGRAM = HERE / "programs" / "island.py"
BUCKET = "s3://bucket/run"
PORT = 9917
Fact = dict[str, Any]


@dataclass(frozen=True)
class Moment:
    """When to kill: after a mark of the process, and up to so many seconds later."""

    name: str
    mark: str
    seconds: float = 0.0


@dataclass
class Kill:
    """A kill that happened.

    Attributes:
      seconds: since the first island trained.
      island, moment: who and when, as planned.
      after: the last thing that the process told before.
      down: seconds until the next start.
    """

    seconds: float
    island: str
    moment: str
    after: str
    down: float


def environment(**more: str) -> dict[str, str]:
    """That of all processes: one thread for arithmetic, no proxy."""
    own = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    path = os.pathsep.join([str(ROOT), str(HERE.parent)])
    flags = "--xla_cpu_multi_thread_eigen=false"
    more = {"PYTHONPATH": path, "XLA_FLAGS": flags, "OPENBLAS_NUM_THREADS": "1", **more}
    return own | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **more}


class Worker:
    """A program that is started again and again, on a host or here.

    Args:
      name: its name.
      command: the command, with that of its host.
      env: environment.
      log: path without suffix; what it tells goes to .jsonl, standard error to .err.

    Attributes:
      facts: what its processes told, each with `life`, the number of the process.
      process: the newest one.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path):
        self.name, self.command = name, list(command)
        self.facts: list[Fact] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.lives = 0
        self._env, self._log, self._news = env, log, threading.Condition()

    def start(self, *more: str) -> None:
        self.lives += 1
        with self._log.with_suffix(".err").open("ab") as err:
            self.process = subprocess.Popen(
                [*self.command, *more], stdout=subprocess.PIPE, stderr=err, env=self._env,
                start_new_session=True,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, args=(self.process, self.lives))
        self._reader.start()

    def _read(self, process: subprocess.Popen[bytes], life: int) -> None:
        assert process.stdout is not None
        with process.stdout as lines, self._log.with_suffix(".jsonl").open("a") as log:
            for line in lines:
                fact = {**json.loads(line), "life": life}
                log.write(json.dumps(fact) + "\n")
                log.flush()
                with self._news:
                    self.facts.append(fact)
                    self._news.notify_all()

    def until(self, ready: Callable[[Fact], bool], seconds: float, start: int = 0) -> Fact | None:
        """The first fact from number `start` on that is `ready`; None if it does not come."""
        deadline = time.monotonic() + seconds
        with self._news:
            while True:
                for fact in self.facts[start:]:
                    if ready(fact):
                        return fact
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._news.wait(left)

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> bool:
        """End it without warning; return whether it ran."""
        if self.process is None or self.process.poll() is not None:
            return False
        self.process.send_signal(signal.SIGKILL)
        self.wait(60)
        return True

    def wait(self, seconds: float) -> int:
        """Wait for its end and for all that it told; return the exit code."""
        assert self.process is not None
        code = self.process.wait(seconds)
        self._reader.join()
        return code


@contextlib.contextmanager
def store(host: Host) -> Iterator[dict[str, str]]:
    """A server of moto on a host, with a bucket; yields the environment that reaches it."""
    program = HERE.parent / "support" / "s3_server.py"
    command = [*host.command, sys.executable, str(program), host.address, str(PORT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


def killed(
    worker: Worker, plan: Sequence[tuple[Moment, float]], begun: float, patience: float, seed: int
) -> list[Kill]:
    """Kill a worker at each moment of a plan, and start it again some seconds later."""
    rng, done, start = random.Random(seed), [], 0
    for moment, down in plan:
        while worker.facts[start].get("mark") != "trains":
            start += 1
        found = worker.until(lambda f, m=moment: f.get("mark") == m.mark, patience, start)
        time.sleep(rng.uniform(0, moment.seconds) if found else 0.0)
        now = time.time()
        was_running = worker.kill()
        assert was_running, f"{worker.name} ended by itself before it was killed"
        last = worker.facts[-1]
        after = last.get("mark", "progress")
        name = moment.name if found else f"{moment.name} (not met)"
        done.append(Kill(round(now - begun, 2), worker.name, name, after, round(down, 1)))
        time.sleep(down)
        start = len(worker.facts)
        worker.start()
        assert worker.until(lambda f: f.get("mark") == "trains", 120, start), worker.name
    return done


@dataclass
class Ran:
    """What a run of islands came to.

    Attributes:
      seconds: from the first update to the end of the last process.
      codes: of the last process of each.
      kills: in the order of time.
      facts: by island.
      replay: what `replay.py` found in the store.
    """

    seconds: float
    codes: dict[str, int]
    kills: list[Kill]
    facts: dict[str, list[Fact]]
    replay: dict[str, Any] = field(default_factory=dict)


def run_islands(
    folder: Path,
    names: Sequence[str],
    url: str,
    plans: Mapping[str, Sequence[tuple[Moment, float]]],
    *,
    env: Mapping[str, str],
    hosts: Sequence[Host] = (),
    options: Sequence[str] = (),
    rounds: int = 0,
    patience: float = 40.0,
    seconds: float = 600.0,
) -> Ran:
    """Train islands, kill some of them by their plans, and end all at one anchor.

    Args:
      folder: for logs and checkpoints.
      names: of the islands.
      url: of the run.
      plans: moment and seconds without it, for each kill of an island.
      env: environment beside that of all processes.
      hosts: one of each island; without any all run here.
      options: of `programs/island.py`.
      rounds: that are trained at least; three more than there are after the last start.
      patience: seconds for which a moment is waited for.
      seconds: after which a run that has not ended counts as one that hangs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    last, workers = folder / "last", []
    places = [host.command for host in hosts] or [[] for _ in names]
    for name, place in zip(names, places, strict=False):
        own = ["--name", name, "--url", url, "--folder", str(folder / f"checkpoints-{name}")]
        command = [*place, sys.executable, str(PROGRAM), "island", *own, "--until", str(last)]
        own_env = environment(**env)
        workers.append(Worker(name, [*command, *options], own_env, folder / name))
    kills: list[Kill] = []
    errors: list[BaseException] = []
    deadline = time.monotonic() + seconds
    try:
        for worker in workers:
            worker.start()
        firsts = [w.until(lambda f: f.get("mark") == "trains", 120) for w in workers]
        assert all(firsts), "an island did not start"
        begun = min(f["t"] for f in firsts if f)

        def chain(worker: Worker, number: int) -> None:
            try:
                plan = plans.get(worker.name, ())
                kills.extend(killed(worker, plan, begun, patience, number))
            except BaseException as error:  # shown below
                errors.append(error)

        chains = [threading.Thread(target=chain, args=(w, i)) for i, w in enumerate(workers)]
        for thread in chains:
            thread.start()
        for thread in chains:
            thread.join()
        if errors:
            raise errors[0]
        reached = max([f.get("round") or 0 for w in workers for f in w.facts])
        last.write_text(str(max(rounds, reached + 3)))
        codes = {w.name: w.wait(max(1.0, deadline - time.monotonic())) for w in workers}
        ended = time.time()
    finally:
        for worker in workers:
            worker.kill()
    kills.sort(key=lambda kill: kill.seconds)
    return Ran(ended - begun, codes, kills, {w.name: w.facts for w in workers})


def replayed(url: str, env: Mapping[str, str], host: Host | None = None) -> dict[str, Any]:
    """What `replay.py` finds, on a host or here."""
    place = [] if host is None else host.command
    command = [*place, sys.executable, str(HERE.parent / "support" / "replay.py"), url]
    text = subprocess.run(
        command, env=environment(**env), capture_output=True, text=True, timeout=300, check=True
    )
    return json.loads(text.stdout)


def digests(ran: Ran) -> dict[tuple[str, int], str]:
    """The digest of each anchor that an island told, by island and round."""
    return {
        (name, fact["round"]): fact["digest"]
        for name, facts in ran.facts.items()
        for fact in facts
        if fact.get("digest")
    }


def problems(ran: Ran) -> list[str]:
    """What is not as promised."""
    found, replay = list(ran.replay["wrong"]), ran.replay
    found += [f"{name} ended with {code}" for name, code in ran.codes.items() if code]
    for (name, number), digest in digests(ran).items():
        if number > replay["rounds"] or replay["digests"][number] != digest:
            found.append(f"the anchor of round {number} of {name} is not that of the bucket")
    for name, facts in ran.facts.items():
        rounds = [fact["round"] for fact in facts if fact.get("digest")]
        if rounds[-1] != replay["rounds"]:
            found.append(f"{name} ended in round {rounds[-1]} of {replay['rounds']}")
        if rounds != sorted(rounds):
            found.append(f"{name} went back to an older anchor")
    return found
