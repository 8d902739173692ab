"""Entry point: imports the rest late, so that a missing extra is one line and no traceback."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from ._errors import INTERRUPTED, USAGE_ERROR, CommandError, missing_extra


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits.

    Args:
      argv: arguments without the program's name; None takes those of the process.

    Raises:
      SystemExit: always; 0 done, 1 the training diverged, 2 wrong usage or a missing extra
        (one line on stderr), 130 interrupted.
    """
    try:
        from ._app import run

        code = run(argv)
    except CommandError as error:
        code = _complain(error)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        code = _complain(missing)
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def _complain(error: CommandError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return USAGE_ERROR
