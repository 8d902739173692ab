"""One process of several: when it fails, all end, at once and with the same code."""

import contextlib
import os
import time
import traceback
from collections.abc import Iterator

import jax

from .._errors import FAILED, LOST_A_PROCESS, CommandError, code_of, describe
from ._supervise import PEER_FAILED
from ._watch import Watch, say_error, write_to_stderr

# Errors of the runtime that no other process can have caused: no memory left on a device, mostly.
_OWN = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")


@contextlib.contextmanager
def failing_together(watch: Watch, heartbeat_timeout: int) -> Iterator[None]:
    """What one process does while the others do the same.

    An error is told to the others before this process ends: at its end it would wait for them,
    who wait for it in an exchange. An exchange that fails itself waits for the runtime to find out,
    and abort with, who is gone. At the end of all, the processes part.
    """
    try:
        with watch:
            yield
            jax.distributed.shutdown()  # waits for the others, and while it does they can be told
    except Exception as error:
        if lost_a_peer(error):
            # One that failed has told so before it left, which ended the exchange.
            with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError):
                watch.follow_failed()
            write_to_stderr(f"{PEER_FAILED}: {error}\n")
            time.sleep(heartbeat_timeout + 5)
            os._exit(LOST_A_PROCESS)
        code = code_of(error)
        line = str(error) if isinstance(error, CommandError) else describe(error)
        if code == FAILED and not isinstance(error, CommandError):
            traceback.print_exc()
        else:
            say_error(line)
        watch.announce(code, line)
        os._exit(code)


def lost_a_peer(error: BaseException | None) -> bool:
    """Whether a lost process may have caused an error, or one that led to it."""
    while error is not None:
        # jax raises a failed exchange as a ValueError, too, where it dispatches it from C++.
        of_runtime = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
        if of_runtime and not str(error).startswith(_OWN):
            return True
        error = error.__cause__ or error.__context__
    return False
