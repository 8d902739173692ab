"""Signals that let the step in progress finish."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Literal

from ._cluster import ALONE, Cluster

Stop = Literal["interrupted", "preempted"]


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
        self._cluster = cluster
        self._before: dict[int, Any] = {}

    def after(self, step: int) -> Stop | None:
        """Why to stop after this step; None to go on. To be asked after every step."""
        if self._cluster.reached_stop(step):
            self.asked = "preempted"
        return self.asked

    def __enter__(self) -> "StopOnSignal":
        if threading.current_thread() is threading.main_thread():
            if self._cluster.count > 1:
                self._handle(signal.SIGINT, signal.SIG_IGN)
            else:
                self._handle(signal.SIGINT, self._interrupt)
                self._handle(signal.SIGTERM, self._terminate)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, number: int, handler: Any) -> None:
        self._before[number] = signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.asked == "interrupted":
            raise KeyboardInterrupt
        self.asked = "interrupted"

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or "preempted"
