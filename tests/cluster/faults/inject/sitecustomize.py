"""Makes something go wrong inside a training process; Python imports it at every start.

What, is in the environment as JSON, and it happens in trainers alone, not in their parents:

    {"process": 1, "event": "open", "path": "record/metadata", "do": "raise", "errno": 5}

- `process`: its `--process-id`; without it every trainer.
- When: at an audit event of Python (`event`, with `path`, a regular expression, in one of its
  arguments), or once
  metrics.jsonl has a record of `step` that was not there when the process began.
- `do`: "raise" an OSError with that `errno`, or a RuntimeError; "hang"; send itself a `signal`.
- `once`: a file; made when it happens, and then it does not happen again.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from typing import Any

_TAIL_BYTES = 2**16


def _given(option: str) -> str:
    arguments = sys.orig_argv
    return arguments[arguments.index(option) + 1] if option in arguments else ""


def _act(fault: dict[str, Any]) -> None:
    if "once" in fault:
        if os.path.exists(fault["once"]):
            return
        os.close(os.open(fault["once"], os.O_CREAT))
    if fault["do"] == "raise":
        if "errno" in fault:
            raise OSError(fault["errno"], os.strerror(fault["errno"]), "of this test")
        raise RuntimeError("of this test")
    if fault["do"] == "hang":
        while True:
            time.sleep(60)
    if fault["do"] == "signal":
        os.kill(os.getpid(), fault["signal"])


def _at_event(fault: dict[str, Any]) -> None:
    wanted, path = fault["event"], re.compile(fault["path"])
    busy = threading.local()

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event != wanted or getattr(busy, "acts", False):
            return
        if any(path.search(os.fsdecode(a)) for a in arguments if isinstance(a, str | bytes)):
            busy.acts = True
            try:
                _act(fault)
            finally:
                busy.acts = False

    sys.addaudithook(look)


def _at_step(fault: dict[str, Any]) -> None:
    metrics = os.path.join(_given("--out"), "metrics.jsonl")
    before = _signature(metrics)
    # A handler runs in the main thread, between two of its instructions.
    signal.signal(signal.SIGUSR1, lambda number, frame: _act(fault))
    # Where these are instructions of a destructor or of a callback of a weak reference, Python
    # discards the exception. Then the handler runs once more.
    discarded = sys.unraisablehook

    def again(unraisable: Any) -> None:
        if "of this test" in str(unraisable.exc_value):
            if "once" in fault:
                os.unlink(fault["once"])
            # Not here: what is raised in this hook is discarded, too.
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        else:
            discarded(unraisable)

    sys.unraisablehook = again

    def watch() -> None:
        while _signature(metrics) == before or _last_step(metrics) < fault["step"]:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=watch, daemon=True).start()


def _signature(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _last_step(path: str) -> int:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            line = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        return json.loads(line)["step"]
    except (OSError, ValueError, KeyError):
        return 0


def _begin() -> None:
    told = os.environ.get("JAXSLOWMO_TEST_FAULT")
    if told is None or "JAXSLOWMO_CHILD" not in os.environ:
        return
    fault = json.loads(told)
    if fault.get("process") is None or _given("--process-id") == str(fault["process"]):
        (_at_step if "step" in fault else _at_event)(fault)


_begin()
