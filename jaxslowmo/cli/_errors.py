"""How commands end: exit codes, and one line that says what to do about a wrong call."""

import contextlib
from collections.abc import Iterator

DIVERGED = 1
USAGE_ERROR = 2
LOST_A_PROCESS = 75  # EX_TEMPFAIL: try again
INTERRUPTED = 130  # as shells say of a program that SIGINT ended
# By how a run ended; SIGTERM, which preempts, lets it end well.
EXIT_CODES = {"finished": 0, "preempted": 0, "diverged": DIVERGED, "interrupted": INTERRUPTED}

# What the `train` extra installs and the command line imports.
_EXTRA = frozenset({"etils", "flax", "matplotlib", "orbax", "rich", "tensorstore", "typer"})


class CommandError(Exception):
    """Ends the command with its message as the only line on stderr, and exit code 2."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns a `ValueError` of the library about an argument into a `CommandError`.

    Only around set-up: a `ValueError` during training is a bug and keeps its traceback.
    """
    try:
        yield
    except ValueError as error:
        raise CommandError(str(error)) from error


def missing_extra(error: ModuleNotFoundError) -> CommandError | None:
    """What to say about a failed import; None if no part of the `train` extra is missing."""
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRA:
        return None
    return CommandError(
        f'the command line needs {package}, which is not installed: pip install "jaxslowmo[train]"'
    )
