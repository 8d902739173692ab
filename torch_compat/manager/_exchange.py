"""The host's side of a step: turns of threads, and access to the shared memory."""

import enum
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from ..errors import TPUWorkerError
from ..messages import Commit, Computed, Failed, Loaded, Ready, Step, StepDone, Stop
from ..settings import Settings

# A process that ends has an exit code only after its end: seconds later on a busy machine.
_REAP_SECONDS = 10.0


class _Phase(enum.Enum):
    """The phase that the last step has reached."""

    OVER = enum.auto()
    LOADING = enum.auto()  # the devices read the master's parameters
    COMPUTING = enum.auto()
    COMPUTED = enum.auto()
    COMMITTING = enum.auto()  # the device process writes into the master's gradients


class StepExchange:
    """The messages from a `TPUManager` to its device process, from any of the host's threads.

    One thread at a time has the turn and takes a step. It holds `lock` only while the device
    process accesses the shared memory; every other thread that accesses it holds `lock`, too. A
    thread may be interrupted anywhere (Ctrl-C); the next thread then finishes its step.

    Args:
      process: the manager, before its start as the device process.

    Attributes:
      lock: lock between the host's threads. It is not shared with the device process, which could
        die and leave it held.
      failure: the first failure, or None.
      num_devices: number of devices, counted by the device process; None before the first step.
    """

    def __init__(self, process: Any):
        # A weak reference: the manager refers to this object, and a cycle would keep its memory.
        self._process = weakref.proxy(process)
        self.lock = threading.RLock()
        self.failure: TPUWorkerError | None = None
        self.num_devices: int | None = None
        self._turn = threading.Lock()
        self._stepping: int | None = None  # the thread that has the turn for a step
        self._phase = _Phase.OVER
        self._answer: StepDone | None = None

    def open(self, connection: Connection) -> None:
        """Use `connection`, the host's end of a connection to the process just started."""
        self._connection = connection
        self._start_time = time.monotonic()

    def check_running(self) -> None:
        """Raise the failure of the device process, or `RuntimeError` before the start."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self._process.pid is None:
            raise RuntimeError("This TPUManager has not been started: call start().")

    def fail(self, failure: TPUWorkerError) -> TPUWorkerError:
        """Keep the first failure, for all later calls, and return it."""
        self.failure = self.failure or failure
        return self.failure

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run the block as the only step, after finishing one that was interrupted."""
        if self._stepping == threading.get_ident():
            raise RuntimeError("step() was called inside of step(), as by a signal's handler.")
        with self._turn:
            self._stepping = threading.get_ident()
            try:
                self.check_running()
                self._settle()
                yield
            finally:
                self._stepping = None

    def wait_until_ready(self, limit: float | None) -> None:
        """Wait for the devices, with the turn, at most `limit` seconds from the start."""
        if self.num_devices is None:
            deadline = None if limit is None else self._start_time + limit
            answer = self._receive(deadline, f"`init_timeout` = {limit} s")
            assert isinstance(answer, Ready)
            self.num_devices = answer.num_devices

    def step(
        self, prepare: Callable[[], tuple[bool, Settings]], before_commit: Callable[[], object]
    ) -> StepDone:
        """Take one step, with the turn.

        Args:
          prepare: function that is called with the lock before the step. It returns whether to load
            the master's parameters, and settings of the model that changed since the last step.
          before_commit: function that is called with the lock when the devices have computed.
        """
        deadline = self._deadline()
        with self.memory():
            load, changes = prepare()
            self._send(Step(load, changes))
            self._phase = _Phase.LOADING if load else _Phase.COMPUTING
            self._before_commit = before_commit
            self._finish_transfer(deadline)
        return self._finish_step(deadline)

    def _settle(self) -> None:
        """Finish a step that was interrupted, with the turn; it still adds gradients."""
        if self._phase is not _Phase.OVER and self.failure is None:
            self._finish_step(self._deadline())

    def _finish_step(self, deadline: float | None) -> StepDone:
        """Wait for the devices without the lock, with the turn; then let them write under it."""
        if self._phase is _Phase.LOADING:
            with self.memory():
                pass
        if self._phase is _Phase.COMPUTING:
            self._expect(Computed, deadline)
            self._phase = _Phase.COMPUTED
        with self.memory():
            if self._phase is _Phase.COMPUTED:
                self._before_commit()
                self._send(Commit())
                self._phase = _Phase.COMMITTING
                self._finish_transfer(deadline)
        assert self._answer is not None
        return self._answer

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Run the block with the lock, while the device process is not in the shared memory."""
        with self.lock:
            if self.failure is None:
                # An interrupted thread may have released the lock before the process was done.
                self._finish_transfer(self._deadline())
            yield

    @contextmanager
    def settled_memory(self) -> Iterator[None]:
        """Run the block as in `memory`, after finishing a step that was interrupted."""
        if self._turn.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._turn.release()
        with self.memory():
            yield

    @contextmanager
    def idle(self, timeout: float) -> Iterator[bool]:
        """Wait up to `timeout` seconds for a running step; yield whether none runs in the block."""
        idle = self._turn.acquire(timeout=timeout)
        try:
            yield idle
        finally:
            if idle:
                self._turn.release()

    def stop(self) -> None:
        """Request that the process ends; call it only when `idle`."""
        with suppress(OSError):
            self._connection.send(Stop())

    def _finish_transfer(self, deadline: float | None) -> None:
        """Wait, with the lock, until the device process has left the shared memory."""
        if self._phase is _Phase.LOADING:
            self._expect(Loaded, deadline)
            self._phase = _Phase.COMPUTING
        elif self._phase is _Phase.COMMITTING:
            self._answer = self._expect(StepDone, deadline)
            self._phase = _Phase.OVER

    def _deadline(self) -> float | None:
        limit = self._process.step_timeout
        return None if limit is None else time.monotonic() + limit

    def _expect(self, kind: type[Any], deadline: float | None) -> Any:
        answer = self._receive(deadline, f"`step_timeout` = {self._process.step_timeout} s")
        assert isinstance(answer, kind)
        return answer

    def _send(self, request: Step | Commit) -> None:
        try:
            self._connection.send(request)
        except OSError:
            # Raises an error with the process' last message, or with its exit code.
            self._receive(time.monotonic() + 1, "a second")

    def _receive(self, deadline: float | None, limit: str) -> Ready | Loaded | Computed | StepDone:
        process = self._process
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        ready = wait([self._connection, process.sentinel], left)
        if self._connection in ready:
            try:
                answer = self._connection.recv()
            except (EOFError, OSError):
                process.join(_REAP_SECONDS)
            else:
                if not isinstance(answer, Failed):
                    return answer
                raise self.fail(TPUWorkerError(answer.message, worker_traceback=answer.traceback))
        if not ready:
            process.kill()
            process.join(_REAP_SECONDS)
            message = f"The device process gave no answer within {limit} and was killed."
            raise self.fail(TPUWorkerError(message, exitcode=process.exitcode))
        process.join(_REAP_SECONDS)
        message = f"The device process ended with {_describe(process.exitcode)}."
        raise self.fail(TPUWorkerError(message, exitcode=process.exitcode))


def _describe(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"exit code {exitcode}"
    return f"exit code {exitcode} ({signal.Signals(-exitcode).name})"
