"""Makes something go wrong inside a training process; Python imports it at every start.

What, is in the environment as JSON, and it happens in the trainer with that `--process-id` alone,
not in its parent:

    {"process": 1, "event": "os.scandir", "path": "checkpoints/50"}
    {"process": 1, "step": 7}

It hangs at an audit event of Python with `path`, a regular expression, in one of its arguments; or
raises a RuntimeError once metrics.jsonl has a record of `step`.
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


def _at_event(fault: dict[str, Any]) -> None:
    path = re.compile(fault["path"])

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event != fault["event"]:
            return
        while any(path.search(os.fsdecode(a)) for a in arguments if isinstance(a, str | bytes)):
            time.sleep(60)

    sys.addaudithook(look)


def _raise(number: int, frame: Any) -> None:
    raise RuntimeError("of this test")


def _at_step(fault: dict[str, Any]) -> None:
    metrics = os.path.join(_given("--out"), "metrics.jsonl")
    # A handler runs in the main thread, between two of its instructions.
    signal.signal(signal.SIGUSR1, _raise)
    # Where these are instructions of a destructor or of a callback of a weak reference, Python
    # discards the exception. Then the handler runs once more.
    discarded = sys.unraisablehook

    def again(unraisable: Any) -> None:
        if "of this test" in str(unraisable.exc_value):
            # Not here: what is raised in this hook is discarded, too.
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        else:
            discarded(unraisable)

    sys.unraisablehook = again

    def watch() -> None:
        while _last_step(metrics) < fault["step"]:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=watch, daemon=True).start()


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
    if _given("--process-id") == str(fault["process"]):
        (_at_step if "step" in fault else _at_event)(fault)


_begin()
