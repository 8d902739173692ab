"""Signals: handlers for a while, and those that let the step in progress finish."""

import contextlib
import signal
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Literal

from ._launchers import ALONE, Cluster

Stop = Literal["interrupted", "preempted"]
Handler = Callable[[int, FrameType | None], None] | signal.Handlers


@contextlib.contextmanager
def handling(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Within it the signals have these handlers; only for the main thread."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopOnSignal:
    """Context in which Ctrl-C and SIGTERM only ask for an end after the step in progress.

    An exception in the middle of a step would leave a state whose buffers are given away. A second
    Ctrl-C raises as usual. Where a run has several processes, all must stop after the same step:
    SIGTERM goes to the runtime, which agrees on one, and Ctrl-C is left to the process's parent.

    Attributes:
      asked: why to stop, as far as this process knows.
    """

    def __init__(self, cluster: Cluster = ALONE) -> None:
        self.asked: Stop | None = None
        self._calls = 0
        self._has_peers, self._watch = cluster.count > 1, cluster.watch
        self._handled = contextlib.ExitStack()

    def after_step(self, kind: Hashable = ()) -> Stop | None:
        """Why to stop after this step; None to go on. To be asked after every step.

        Args:
          kind: of the step; those of one kind take about as long as each other.

        Communication: none between devices; between processes messages through the coordinator once
          one of them got SIGTERM, to agree on a step that none has passed.
        """
        if self._watch is not None:
            self._watch.step_done(kind)
        if self._has_peers:
            from jax.experimental import multihost_utils

            # Processes agree on the number of a call, which is 1 where none was made yet: a run
            # that goes on at step 20 would never come by it, were these its steps.
            self._calls += 1
            if multihost_utils.reached_preemption_sync_point(self._calls):
                self.asked = "preempted"
        return self.asked

    def besides_steps(self) -> contextlib.AbstractContextManager[None]:
        """To be around what takes longer than a step."""
        return contextlib.nullcontext() if self._watch is None else self._watch.besides_steps()

    def __enter__(self) -> "StopOnSignal":
        handlers: dict[int, Handler] = {
            signal.SIGINT: self._interrupt,
            signal.SIGTERM: self._terminate,
        }
        if self._has_peers:
            handlers = {signal.SIGINT: signal.SIG_IGN}
        if threading.current_thread() is threading.main_thread():
            self._handled.enter_context(handling(handlers))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handled.close()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.asked == "interrupted":
            raise KeyboardInterrupt
        self.asked = "interrupted"

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or "preempted"
