"""What the device process of a `TPUManager` does, whatever drives its devices."""

import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from .errors import describe
from .messages import Commit, Computed, Failed, Loaded, Ready, Step, StepDone, Stop


@dataclass(frozen=True)
class WorkerOptions:
    """How the device process trains; the arguments of `TPUManager`."""

    nprocs: int | None
    batch_size_per_device: int
    grad_accumulation_steps: int
    collate_fn: Callable[[list[Any]], Any] | None
    seed_base: int


class GroupFailed(Exception):
    """One of the devices has failed; its report says which and how."""

    def __init__(self, report: Failed):
        super().__init__(report.message)
        self.report = report


class Stopped(Exception):
    """The host wants no more, in the middle of a step."""


class Link:
    """The device process' end of the connection to the host."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def next_request(self) -> Step | Commit | Stop:
        """Wait for what the host asks for."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return Stop()

    def loaded(self, number: int) -> None:
        """Tell that all devices have the master's parameters."""
        self._connection.send(Loaded(number))

    def wait_to_commit(self, number: int) -> None:
        """Tell that a step's gradients are there, and wait until they may be written.

        Raises:
          Stopped: if the host wants to end instead.
        """
        self._connection.send(Computed(number))
        if not isinstance(self.next_request(), Commit):
            raise Stopped

    def send(self, answer: Ready | StepDone | Failed) -> None:
        """Send to the host."""
        self._connection.send(answer)


class Group(Protocol):
    """All devices of the process."""

    num_devices: int

    def step(self, request: Step, link: Link) -> StepDone:
        """Take a step, which calls `link.loaded`, if it loads, and `link.wait_to_commit`."""
        ...


def serve(connection: Connection, open_group: Callable[[], Group]) -> None:
    """Answer `Step` requests on `connection` until `Stop`, or until the other side is gone.

    A failure is reported once; from then on the process only waits to be stopped.
    """
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    link = Link(connection)
    try:
        group = open_group()
        link.send(Ready(group.num_devices))
        while isinstance(request := link.next_request(), Step):
            link.send(group.step(request, link))
    except Stopped:
        pass
    except GroupFailed as failed:
        _report(link, failed.report)
    except BaseException as error:
        message = f"The device process failed: {describe(error)}"
        _report(link, Failed(message, traceback.format_exc()))


def _report(link: Link, failed: Failed) -> None:
    with suppress(OSError):  # nobody is left to tell
        link.send(failed)
        while not isinstance(link.next_request(), Stop):
            pass


def _end_with(host: int) -> None:
    """End this process when the host is gone.

    Forks of the host may hold its end of the connection open, and a thread inside a device cannot
    be called back, so neither is enough to go by.
    """
    while os.getppid() == host:
        time.sleep(0.5)
    os._exit(1)
