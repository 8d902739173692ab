"""The lock of a folder for results: one run at a time reads and writes there."""

import contextlib
import datetime
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from .._errors import CommandError, writing_to

NAME = "lock"
# A holder on another machine counts as dead if it has not touched the file for this long. Clocks
# are not compared, since those of two machines may differ.
_PATIENCE_SECONDS = 20.0
_TOUCH_SECONDS = 3.0
_LOOK_SECONDS = 0.25


class FolderLock:
    """A context in which a folder belongs to this process: OUT/lock names its host and pid.

    A lock whose holder is gone is taken over. On this machine the system knows whether the holder
    lives. A holder on another machine touches the file every few seconds, and a new process watches
    the file for some time.

    Args:
      folder: an existing folder.

    Attributes:
      token: random text in the file, by which other processes of the run recognize it.

    Raises:
      CommandError: on entering: another process holds the lock, or the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.token = uuid.uuid4().hex
        self._folder, self._path = folder, folder / NAME
        self._content = json.dumps(_this_process() | {"token": self.token}).encode()
        self._ended = threading.Event()

    def __enter__(self) -> "FolderLock":
        with writing_to(self._folder):
            while not self._create():
                content = _content(self._path)
                if content is None:  # the holder has just removed it
                    continue
                if not self._is_stale(content):
                    raise CommandError(_in_use(self._folder, content))
                self._clear(content)
        # In another thread, so that a hanging file server does not stop the training.
        threading.Thread(target=self._touch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._give_back()

    def _create(self) -> bool:
        """Create the lock file; return False if it exists."""
        try:
            file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        try:
            os.write(file, self._content)
        except OSError:
            self._path.unlink()
            raise
        finally:
            os.close(file)
        return True

    def _is_stale(self, content: bytes) -> bool:
        """Return whether a lock or its holder is gone; on another machine, watch the file first."""
        alive = _is_alive(content)
        if alive is not None:
            return not alive
        last_touch, end = _touched(self._path), time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
            touched = _touched(self._path)
            if _content(self._path) != content:  # half written before, or of a new holder
                return True
            if touched != last_touch:
                return False
        return True

    def _clear(self, content: bytes) -> None:
        """Remove a stale lock if it still exists; of several new processes only one removes it."""
        # Only the process that creates this guard file may remove the stale lock. Without the guard
        # it could remove the new lock of a faster process.
        guard = self._path.with_name(f"{NAME}.{hashlib.sha256(content).hexdigest()[:12]}")
        try:
            os.close(os.open(guard, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            end = time.monotonic() + _PATIENCE_SECONDS
            while guard.exists() and time.monotonic() < end:
                time.sleep(0.01)
            if time.monotonic() < end:
                return
        else:
            if _content(self._path) == content:
                self._path.replace(guard)
        guard.unlink(missing_ok=True)

    def _touch(self) -> None:
        while not self._ended.wait(_TOUCH_SECONDS):
            with contextlib.suppress(OSError):
                try:
                    os.utime(self._path)
                except FileNotFoundError:
                    # A user has deleted the folder. The run makes it again and still owns it.
                    self._create()
                    if self._ended.is_set():  # the lock was released meanwhile
                        self._give_back()

    def _give_back(self) -> None:
        if _content(self._path) == self._content:
            self._path.unlink()


def sees_lock(folder: Path, token: str, seconds: float) -> bool:
    """Return whether a folder has the lock with this token; wait, as file servers may be late."""
    end = time.monotonic() + seconds
    while True:
        if facts_of(_content(folder / NAME) or b"").get("token") == token:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)


def _this_process() -> dict[str, Any]:
    now = datetime.datetime.now().astimezone()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": now.isoformat(" ", "seconds"),
        "started": _started("self"),
        "namespace": _namespace(),
    }


def _is_alive(content: bytes) -> bool | None:
    """Return whether the process that a lock names lives; None if it is on another machine."""
    holder, this = facts_of(content), _this_process()
    pid = holder.get("pid")
    if not isinstance(pid, int) or any(holder.get(k) != this[k] for k in ("host", "namespace")):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, and belongs to another user
        pass
    started = _started(str(pid))
    # The pid may belong to a later process, which has another start time (None: unknown).
    return started is None or started == holder.get("started")


def _started(pid: str) -> str | None:
    """Return the start time of a process in clock ticks; "" if it has ended; None if unknown."""
    try:
        fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def _namespace() -> str | None:
    """Return an id of this boot and container, within which pids are unique; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def facts_of(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a text; {} if it is damaged or not an object."""
    try:
        facts = json.loads(content)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _in_use(folder: Path, content: bytes) -> str:
    holder = facts_of(content)
    who = (
        f"process {holder['pid']} on {holder.get('host')} since {holder.get('since')}"
        if "pid" in holder
        else f"another process ({folder / NAME})"
    )
    return f"--out {folder} is in use by {who}: take another folder, or end that run"


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _touched(path: Path) -> int | None:
    """Return the time of the last change to a file, in ns; None if it does not exist."""
    try:
        # Of the opened file: network file systems cache what `stat` of a name returns.
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
