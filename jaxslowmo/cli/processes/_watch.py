"""Processes that train together: they join, watch each other, and end together.

A thread ends a process whose main thread cannot, since it waits for others that never come.

An exchange between processes runs in C++, where no handler of Python's runs, and neither a process
that failed nor a signal ends it. So what failed is told by a note, and every process looks for it.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NoReturn

import jax

from ..._support.coordinator import NoNoteError, tell, told, wait_for
from .._errors import (
    FAILED,
    LOST_A_PROCESS,
    TERMINATED,
    TRY_AGAIN,
    CommandError,
    code_of,
    describe,
)
from ..config._cluster import ClusterConfig
from ._address import bind_address
from ._peers import Cluster
from ._supervise import PEER_FAILED

# Errors of the runtime that no other process can have caused: no memory left on a device, mostly.
_OWN = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
_FAILED = "jaxslowmo/failed"
_SEEN = "jaxslowmo/seen"
# Where jax's own thread notes that a process got SIGTERM.
_PREEMPTED = "RECEIVED_PREEMPTION_NOTICE"
_LOOK_SECONDS = 0.5
# Of all processes in a second, at most: hundreds look less often.
_LOOKS_OF_ALL = 200
# After SIGTERM, while nothing advances; ten seconds with what comes before and after.
_STOP_SECONDS = 6.0
# A step may take longer than that, and it is no wait as long as it takes what others took.
_USUAL = 3.0
_REMEMBERED = 5  # of each kind
# What no step tells the length of, the first time.
_FIRST_SECONDS = 120.0
# Without SIGTERM a save in progress is looked at only when little else is told.
_LONG_SECONDS = 60.0
_DISK_SECONDS = 1.0
# What the others get to see a note before the coordinator that holds it is gone.
_SEEN_SECONDS = 5.0
# And, once they have seen it, to leave: one that is there without a coordinator aborts.
_LEAVE_SECONDS = 0.5


class Watch:
    """The thread, from when the processes have joined until they part; a context.

    Another process that failed ends this one with its code. So does SIGTERM to any process once
    nothing has advanced for some seconds, with 143, and `stall` seconds without it, with 75.

    Args:
      index: of this process.
      count: of all.
      stall: seconds; 0: none.
      last_saved: says which step a run that starts again would go on from.

    Communication: four messages to the coordinator per second, and their answers; less often where
      there are hundreds of processes.
    """

    def __init__(self, index: int, count: int, stall: float, last_saved: Callable[[], str]) -> None:
        self._index, self._count, self._stall = index, count, stall
        self._last_saved = last_saved
        self._steps = 0
        self._saving: Callable[[], int] = int
        self._intervals: dict[Hashable, deque[float]] = {}
        self._stepped: float | None = None
        self._longest_besides = 0.0
        self._is_besides = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join(timeout=5)

    def step_done(self, kind: Hashable = ()) -> None:
        """Tells that the main thread advances: it has done a step of some kind.

        Steps that exchange may take much longer than those that do not.
        """
        now = time.monotonic()
        if self._stepped is not None:
            own = self._intervals.setdefault(kind, deque(maxlen=_REMEMBERED))
            own.append(now - self._stepped)
        self._stepped = now
        self._steps += 1

    @contextlib.contextmanager
    def besides_steps(self) -> Iterator[None]:
        """Within it the main thread does what takes longer than steps: an evaluation, say."""
        self._is_besides, began = True, time.monotonic()
        try:
            yield
        finally:
            self._is_besides = False
            self._longest_besides = max(self._longest_besides, time.monotonic() - began)
            self._stepped = None  # the interval says nothing of steps

    def follow(self, written: Callable[[], int]) -> None:
        """Tells what counts the bytes of a save in progress: while they grow, it advances."""
        self._saving = written

    def announce(self, code: int, line: str) -> None:
        """Tells the other processes that this one ends, and why; they end with the same code."""
        # Without a coordinator nobody can be told, and all will know soon.
        with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError, NoNoteError):
            tell(_FAILED, json.dumps([self._index, code, line]))
            if self._index == 0:
                deadline = time.monotonic() + _SEEN_SECONDS
                failed = json.loads(told(_FAILED) or "[0]")[0]
                for other in set(range(1, self._count)) - {failed}:
                    wait_for(f"{_SEEN}/{other}", max(0.0, deadline - time.monotonic()))
                time.sleep(_LEAVE_SECONDS)
            else:
                tell(f"{_SEEN}/{self._index}", "")

    def follow_failed(self) -> None:
        """Ends this process with the code of another that has told that it failed, if one has."""
        if note := told(_FAILED):
            self._follow_other(*json.loads(note))

    def _run(self) -> None:
        asked = False
        marks, since = self._marks(False), time.monotonic()
        while not self._over.wait(max(_LOOK_SECONDS, self._count / _LOOKS_OF_ALL)):
            try:
                self.follow_failed()
                asked = asked or told(_PREEMPTED) is not None
            except (jax.errors.JaxRuntimeError, RuntimeError):
                continue  # the coordinator is gone: the runtime ends this process
            now = self._marks(asked or time.monotonic() - since > _LONG_SECONDS)
            if now != marks:
                marks, since = now, time.monotonic()
            still = time.monotonic() - since
            if asked and still > self._longest():
                self._end(TERMINATED, f"asked to stop, and nothing has advanced for {still:.0f} s")
            if self._stall and still > self._stall:
                self._end(TRY_AGAIN, f"nothing has advanced for {still:.0f} s (--stall-timeout)")

    def _longest(self) -> float:
        """Seconds that what the main thread does may take."""
        # The shortest of each kind: the first ones may have waited for a compiler.
        usual = max((min(own) for own in list(self._intervals.values())), default=0.0)
        if self._is_besides:
            usual = self._longest_besides or _FIRST_SECONDS / _USUAL
        return max(_STOP_SECONDS, _USUAL * usual)

    def _marks(self, looks_at_disk: bool) -> tuple[int, int, int]:
        """What is not the same after a while if anything advances: steps, or a save.

        A save writes, or compresses what it will write.
        """
        written = _within(_DISK_SECONDS, self._saving, 0) if looks_at_disk else 0
        return self._steps, written, int(time.process_time()) if written else 0

    def _follow_other(self, index: int, code: int, line: str) -> NoReturn:
        say_error(f"process {index} has ended: {line}")
        self.announce(code, line)  # the others see it, too, before the coordinator is gone
        os._exit(code)

    def _end(self, code: int, what: str) -> NoReturn:
        saved = _within(_DISK_SECONDS, self._last_saved, "the checkpoints cannot be looked at")
        line = f"{what}; {saved}"
        say_error(line)
        self.announce(code, line)
        os._exit(code)


def _within(seconds: float, call: Callable[[], Any], otherwise: Any) -> Any:
    """What a call gives; something else where a file server does not answer in time."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else otherwise


def say_error(line: str) -> None:
    """One line on stderr, also where the process is about to end without Python's help."""
    write_to_stderr(f"error: {line}\n")


def write_to_stderr(text: str) -> None:
    """Writes at once; that nobody reads it any more must not keep a process from ending."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def join_cluster(config: ClusterConfig) -> Cluster:
    """Connects to the other processes: before anything else touches a device.

    Raises:
      CommandError: where they cannot be found or do not come in time, or process 0 cannot listen
        where it should.
    """
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.num_processes,
            config.process_id,
            cluster_detection_method=None if config.cluster == "auto" else config.cluster,
            initialization_timeout=config.startup_timeout,
            coordinator_bind_address=bind_address(config),
            heartbeat_timeout_seconds=config.heartbeat_timeout,
        )
    except (RuntimeError, ValueError) as error:
        where = config.coordinator or "found by the launcher"
        raise CommandError(
            f"the processes did not come together within --startup-timeout "
            f"{config.startup_timeout} s (coordinator {where}): {str(error).splitlines()[0]}"
        ) from error
    return Cluster(jax.process_index(), jax.process_count())


@contextlib.contextmanager
def failing_together(watch: Watch, heartbeat_timeout: int) -> Iterator[None]:
    """What one process does while the others do the same.

    An error is told to the others before this process ends: at its end it would wait for them,
    who wait for it in an exchange. An exchange that fails itself waits for the runtime to find out,
    and abort with, who is gone. At the end of all, the processes part.
    """
    try:
        with watch:
            yield
            jax.distributed.shutdown()  # waits for the others, and while it does they can be told
    except Exception as error:
        if lost_a_peer(error):
            # One that failed has told so before it left, which ended the exchange.
            with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError):
                watch.follow_failed()
            write_to_stderr(f"{PEER_FAILED}: {error}\n")
            time.sleep(heartbeat_timeout + 5)
            os._exit(LOST_A_PROCESS)
        code = code_of(error)
        line = str(error) if isinstance(error, CommandError) else describe(error)
        if code == FAILED and not isinstance(error, CommandError):
            traceback.print_exc()
        else:
            say_error(line)
        watch.announce(code, line)
        os._exit(code)


def lost_a_peer(error: BaseException | None) -> bool:
    """Whether a lost process may have caused an error, or one that led to it."""
    while error is not None:
        # jax raises a failed exchange as a ValueError, too, where it dispatches it from C++.
        of_runtime = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
        if of_runtime and not str(error).startswith(_OWN):
            return True
        error = error.__cause__ or error.__context__
    return False
