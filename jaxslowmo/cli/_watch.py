"""Processes that train together: how they join, watch each other, and end together.

An exchange between processes runs in C++, where no signal handler of Python runs, and the failure
of another process does not end it. So a process that fails leaves a note at the coordinator, and
every process looks for such a note.
"""

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NoReturn

import jax

from .._support.coordinator import NoNoteError, read_note, wait_for_note, write_note
from ._config import ClusterConfig
from ._errors import FAILED, TERMINATED, TOO_LATE, TRY_AGAIN, CommandError, code_of, describe
from ._processes import Cluster, bind_address, separate_runtime_output, write_stderr

# Errors of the runtime that no other process causes, such as a device without free memory.
_LOCAL_ERRORS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
_FAILED = "jaxslowmo/failed"
_SEEN = "jaxslowmo/seen"
# The note of a thread of jax that a process got SIGTERM.
_PREEMPTED = "RECEIVED_PREEMPTION_NOTICE"
_LOOK_SECONDS = 0.5
# The most looks per second of all processes together; hundreds of processes look less often.
_LOOKS_OF_ALL = 200
# Seconds without progress after SIGTERM; with the steps before and after that makes ten.
_STOP_SECONDS = 6.0
# A slow step is no standstill: it may take this many times as long as earlier ones.
_SLOWDOWN = 3.0
# The limit for the first evaluation, of which no earlier one tells the length.
_FIRST_SECONDS = 120.0
# Without SIGTERM the bytes of a save count only after this long without a step.
_LONG_SECONDS = 60.0
_DISK_SECONDS = 1.0
# Process 0 holds the notes, and stays this long so that the others can read one.
_SEEN_SECONDS = 5.0
# After that they need time to leave: a process without a coordinator aborts.
_LEAVE_SECONDS = 0.5
# By how much jax waits longer than this process for the others; it would abort.
_LONGER_SECONDS = 60


class Watch:
    """A context whose thread ends this process when the run cannot go on.

    When another process has failed, this one ends with the same code. After SIGTERM to any process
    it ends with code 143 if nothing advances for some seconds; without SIGTERM it ends with code 75
    if nothing advances for `stall` seconds.

    Args:
      index: index of this process, 0 <= index < count.
      count: number of processes.
      stall: seconds; 0: no limit.
      last_saved: returns, in words, the step from which a run that starts again goes on.

    Communication: four messages to the coordinator per second, and their answers; fewer with
      hundreds of processes.
    """

    def __init__(self, index: int, count: int, stall: float, last_saved: Callable[[], str]) -> None:
        self._index, self._count, self._stall = index, count, stall
        self._last_saved = last_saved
        self._steps = 0
        self._bytes_written: Callable[[], int] = int
        self._shortest: dict[Hashable, float] = {}
        self._last_step_time: float | None = None
        self._longest_outside_steps = 0.0
        self._is_outside_steps = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join(timeout=5)

    def step_done(self, kind: Hashable = ()) -> None:
        """Note that the main thread has done a step of some kind.

        Each kind is timed separately, since steps with an exchange may take much longer.
        """
        now = time.monotonic()
        if self._last_step_time is not None:
            shortest = self._shortest.get(kind, math.inf)
            self._shortest[kind] = min(now - self._last_step_time, shortest)
        self._last_step_time, self._steps = now, self._steps + 1

    @contextlib.contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Run the block as work that may take longer than a step, such as an evaluation."""
        self._is_outside_steps, began = True, time.monotonic()
        try:
            yield
        finally:
            self._is_outside_steps = False
            self._longest_outside_steps = max(self._longest_outside_steps, time.monotonic() - began)
            self._last_step_time = None  # the interval to the next step does not measure a step

    def watch_save(self, written: Callable[[], int]) -> None:
        """Use `written`, which counts the bytes of a save in progress, as a sign of progress."""
        self._bytes_written = written

    def exit_with(self, code: int, line: str) -> NoReturn:
        """End this process, and tell the others why; they end with the same code."""
        # Without a coordinator no note can be left, and the runtime ends all processes.
        with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError, NoNoteError):
            write_note(_FAILED, json.dumps([self._index, code, line]))
            if self._index == 0:
                deadline = time.monotonic() + _SEEN_SECONDS
                failed = json.loads(read_note(_FAILED) or "[0]")[0]
                for other in set(range(1, self._count)) - {failed}:
                    wait_for_note(f"{_SEEN}/{other}", max(0.0, deadline - time.monotonic()))
                time.sleep(_LEAVE_SECONDS)
            else:
                write_note(f"{_SEEN}/{self._index}", "")
        os._exit(code)

    def follow_failure(self) -> None:
        """End this process with the code of another one that has reported a failure, if any."""
        if note := read_note(_FAILED):
            index, code, line = json.loads(note)
            write_stderr(f"error: process {index} has ended: {line}\n")
            self.exit_with(code, line)  # also announces it, before the coordinator is gone

    def _run(self) -> None:
        stop_requested, parent = False, os.getppid()
        marks, since = self._progress_counters(False), time.monotonic()
        while not self._over.wait(max(_LOOK_SECONDS, self._count / _LOOKS_OF_ALL)):
            if os.getppid() != parent:  # nobody would report on this process
                os._exit(128 + signal.SIGKILL)
            try:
                self.follow_failure()
                stop_requested = stop_requested or read_note(_PREEMPTED) is not None
            except (jax.errors.JaxRuntimeError, RuntimeError):
                continue  # the coordinator is gone: the runtime ends this process
            now = self._progress_counters(
                stop_requested or time.monotonic() - since > _LONG_SECONDS
            )
            if now != marks:
                marks, since = now, time.monotonic()
            still = time.monotonic() - since
            if stop_requested and still > self._time_limit():
                self._exit_without_progress(
                    TERMINATED, f"asked to stop, and nothing has advanced for {still:.0f} s"
                )
            if self._stall and still > self._stall:
                self._exit_without_progress(
                    TRY_AGAIN, f"nothing has advanced for {still:.0f} s (stall_timeout)"
                )

    def _time_limit(self) -> float:
        """Return the seconds that the present work of the main thread may take."""
        # The shortest step of each kind, since the first ones may include compilation.
        usual = max([0.0, *self._shortest.values()])
        if self._is_outside_steps:
            usual = self._longest_outside_steps or _FIRST_SECONDS / _SLOWDOWN
        return max(_STOP_SECONDS, _SLOWDOWN * usual)

    def _progress_counters(self, looks_at_disk: bool) -> tuple[int, int, int]:
        """Return numbers that change whenever steps or a save advance.

        A save writes bytes, or uses CPU time to compress them.
        """
        written = _call_with_timeout(_DISK_SECONDS, self._bytes_written, 0) if looks_at_disk else 0
        return self._steps, written, int(time.process_time()) if written else 0

    def _exit_without_progress(self, code: int, what: str) -> NoReturn:
        saved = _call_with_timeout(
            _DISK_SECONDS, self._last_saved, "the checkpoints cannot be looked at"
        )
        line = f"{what}; {saved}"
        write_stderr(f"error: {line}\n")
        self.exit_with(code, line)


def _call_with_timeout(seconds: float, call: Callable[[], Any], otherwise: Any) -> Any:
    """Return the result of a call, or `otherwise` if a file server does not answer in time."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else otherwise


def join_cluster(config: ClusterConfig) -> Cluster:
    """Connect to the other processes; call it before anything else touches a device.

    The process ends if they do not join in time.

    Raises:
      CommandError: the launcher is not found, or process 0 cannot listen at its address.
    """
    seconds = config.startup_timeout
    late = threading.Timer(seconds, _exit_late, [seconds])
    late.daemon = True
    separate_runtime_output()
    late.start()
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.num_processes,
            config.process_id,
            cluster_detection_method=None if config.cluster == "auto" else config.cluster,
            initialization_timeout=seconds + _LONGER_SECONDS,
            coordinator_bind_address=bind_address(config),
            heartbeat_timeout_seconds=config.heartbeat_timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise CommandError(f"--cluster {config.cluster}: {error}") from error
    finally:
        late.cancel()
    return Cluster(jax.process_index(), jax.process_count())


def _exit_late(seconds: float) -> NoReturn:
    write_stderr(f"error: not all processes came together within {seconds} s (startup_timeout)\n")
    os._exit(TOO_LATE)


@contextlib.contextmanager
def propagate_failures(watch: Watch) -> Iterator[None]:
    """Run the block in one of several processes, so that an error in one ends all of them.

    An error is reported to the others before this process ends: at its end it would wait for them
    while they wait for it in an exchange. After a failed exchange this process aborts, as the
    runtime does when it misses another process. At the end the processes disconnect.
    """
    try:
        with watch:
            yield
            jax.distributed.shutdown()  # waits for the others; `watch` still runs
    except Exception as error:
        if is_peer_failure(error):
            # A process that fails leaves its note first; only then it ends, and the exchange fails.
            with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError):
                watch.follow_failure()
            traceback.print_exc(file=sys.__stderr__)  # beside the words of the runtime
            os.abort()
        code, line = code_of(error), describe(error)
        if code == FAILED and not isinstance(error, CommandError):
            traceback.print_exc()
        else:
            write_stderr(f"error: {line}\n")
        watch.exit_with(code, line)


def is_peer_failure(error: BaseException | None) -> bool:
    """Return whether a lost process may have caused an error, or one of its causes.

    The runtime has no type of error for it. The texts are those of jax 0.10 to 0.12.
    """
    while error is not None:
        # jax raises a failed exchange as a ValueError when C++ code dispatches the program.
        of_runtime = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
        if of_runtime and not str(error).startswith(_LOCAL_ERRORS):
            return True
        error = error.__cause__ or error.__context__
    return False
