"""Warnings that a user wants once, not at every trace."""

import warnings
from collections.abc import Callable


def warn_once() -> Callable[[str], None]:
    """A function that issues each message as a `UserWarning` the first time only."""
    seen: set[str] = set()

    def warn(message: str) -> None:
        if message not in seen:
            seen.add(message)
            warnings.warn(message, UserWarning, stacklevel=3)

    return warn
