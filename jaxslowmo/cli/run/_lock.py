"""The lock of a folder of results: one run at a time reads and writes there."""

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
# A holder that cannot be looked at from here is taken for dead when it touched the file this long
# not once; no clocks are compared, since those of two machines may differ.
_PATIENCE_SECONDS = 20.0
_TOUCH_SECONDS = 3.0
_LOOK_SECONDS = 0.25


class FolderLock:
    """Context in which a folder belongs to this process: OUT/lock says so, with host and pid.

    A lock whose holder is gone is taken over. On this machine the system knows the processes; a
    holder elsewhere touches the file every few seconds, which a newcomer watches for some time.

    Args:
      folder: exists.

    Attributes:
      token: in the file, so that other processes of the same run can tell that they see it.

    Raises:
      CommandError: on entering: another process holds it, or no file can be made there.
    """

    def __init__(self, folder: Path) -> None:
        self.token = uuid.uuid4().hex
        self._folder, self._path = folder, folder / NAME
        self._content = json.dumps(_this_process() | {"token": self.token}).encode()
        self._ended = threading.Event()

    def __enter__(self) -> "FolderLock":
        with writing_to(self._folder):
            while not self._create():
                found = _content(self._path)
                if found is None:  # it has just ended
                    continue
                if not self._is_stale(found):
                    raise CommandError(_in_use(self._folder, found))
                self._clear(found)
        # A thread of its own: a file server that hangs must stop nothing else.
        threading.Thread(target=self._touch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._give_back()

    def _create(self) -> bool:
        """Whether there was none."""
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
        """Whether the holder of a lock, or the lock, is gone; waits where only its file tells."""
        alive = _is_alive(content)
        if alive is not None:
            return not alive
        before, end = _touched(self._path), time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
            touched = _touched(self._path)
            if _content(self._path) != content:  # half written before, or another's now
                return True
            if touched != before:
                return False
        return True

    def _clear(self, content: bytes) -> None:
        """Takes a stale lock away, if it is still there: of several newcomers one does."""
        # Who holds this name may remove that lock, and nobody else: else one could remove the lock
        # of another who was faster.
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
                    # Somebody has deleted the folder. The run makes it again, and it is still its.
                    self._create()
                    if self._ended.is_set():  # meanwhile
                        self._give_back()

    def _give_back(self) -> None:
        if _content(self._path) == self._content:
            self._path.unlink()


def sees_lock(folder: Path, token: str, seconds: float) -> bool:
    """Whether the lock with this token is in a folder, which a file server may show late."""
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
    """Whether the process that a lock names lives; None where that cannot be told from here."""
    held, here = facts_of(content), _this_process()
    pid = held.get("pid")
    if not isinstance(pid, int) or any(held.get(k) != here[k] for k in ("host", "namespace")):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    started = _started(str(pid))
    # The number may be another process's by now. What cannot be read says nothing.
    return started is None or started == held.get("started")


def _started(pid: str) -> str | None:
    """When a process began, in ticks of this machine; "" for one that has ended; None: unknown."""
    try:
        fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def _namespace() -> str | None:
    """Where process numbers mean what they mean here: this boot, and the container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def facts_of(content: bytes) -> dict[str, Any]:
    """Return the object that JSON holds; {} where it is damaged, or something else."""
    try:
        facts = json.loads(content)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _in_use(folder: Path, content: bytes) -> str:
    held = facts_of(content)
    who = (
        f"process {held['pid']} on {held.get('host')} since {held.get('since')}"
        if "pid" in held
        else f"another process ({folder / NAME})"
    )
    return f"--out {folder} is in use by {who}: take another folder, or end that run"


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _touched(path: Path) -> int | None:
    """The file's time: of the opened file, because a file server remembers those of names."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
