"""The device process of a `TPUManager`, for any backend."""

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
from .reader import DataError


@dataclass(frozen=True)
class WorkerOptions:
    """The arguments of `TPUManager` that the device process needs."""

    nprocs: int | None
    batch_size_per_device: int
    grad_accumulation_steps: int
    collate_fn: Callable[[list[Any]], Any] | None
    seed_base: int

    def samples_per_step(self, num_devices: int) -> int:
        """Return the number of samples that all devices take in a step."""
        return self.batch_size_per_device * self.grad_accumulation_steps * num_devices


class GroupFailed(Exception):
    """One of the devices has failed; its report names the device and the failure."""

    def __init__(self, report: Failed):
        super().__init__(report.message)
        self.report = report


def failure_of_device(index: int, num_devices: int, error: BaseException) -> Failed:
    """Return the report of an exception in the thread of a device, while it is handled."""
    name = f"Device {index} of {num_devices}"
    if isinstance(error, DataError):
        return Failed(f"{name}: {error}", error.end.traceback)
    return Failed(f"{name} failed: {describe(error)}", traceback.format_exc())


class Stopped(Exception):
    """The host has requested the end in the middle of a step."""


class Link:
    """The device process' end of the connection to the host."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def next_request(self) -> Step | Commit | Stop:
        """Wait for the next request of the host."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return Stop()

    def wait_to_commit(self) -> None:
        """Notify the host that a step's gradients are computed; wait until they may be written.

        Raises:
          Stopped: the host requests the end instead.
        """
        self.send(Computed())
        if not isinstance(self.next_request(), Commit):
            raise Stopped

    def send(self, answer: Ready | Loaded | Computed | StepDone | Failed) -> None:
        """Send a message to the host."""
        self._connection.send(answer)


class Group(Protocol):
    """All devices of the process."""

    num_devices: int

    def step(self, request: Step, link: Link) -> StepDone:
        """Take a step; send `Loaded`, if it loads parameters, and call `link.wait_to_commit`."""
        ...


def serve(connection: Connection, open_group: Callable[[], Group]) -> None:
    """Answer `Step` requests on `connection` until `Stop`, or until the host has ended.

    A failure is reported once; after that the process only waits for `Stop`.
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
    with suppress(OSError):  # the host has ended
        link.send(failed)
        while not isinstance(link.next_request(), Stop):
            pass


def _end_with(host: int) -> None:
    """End this process when the host has ended.

    The connection may stay open, since forks of the host may hold its end, and a thread inside a
    device cannot be interrupted. So this polls the id of the parent process.
    """
    while os.getppid() == host:
        time.sleep(0.5)
    os._exit(1)
