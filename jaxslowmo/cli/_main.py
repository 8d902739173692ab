"""The entry point; it imports the rest late, so that a missing extra is one line on stderr."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .._support.extras import missing_extra
from ._errors import FAILED, INTERRUPTED, CommandError, code_of, describe


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
      argv: arguments without the name of the program; None: those of the process.

    Raises:
      SystemExit: always. 0: done; 1: the training diverged; 2: wrong usage or a missing extra;
        75: a disk or file server that may recover (both with one line on stderr); 130: interrupted.
    """
    try:
        from ._app import run

        try:
            code = run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # of `| head`; what is not written yet would fail again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = FAILED
    except ModuleNotFoundError as error:
        missing = missing_extra("the command line", error)
        if missing is None:
            raise
        code = _complain(CommandError(missing))
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if not isinstance(error, CommandError) and code_of(error) == FAILED:
            raise
        code = _complain(error)
    sys.exit(code)


def _complain(error: Exception) -> int:
    line = str(error) if isinstance(error, CommandError) else describe(error)
    print(f"error: {line}", file=sys.stderr)
    return code_of(error)
