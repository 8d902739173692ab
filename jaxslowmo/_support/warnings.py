"""Warnings that a user wants once, not at every trace, and at a line of their own."""

import sys
import warnings
from collections.abc import Callable

# Between the line of a user and ours stand, for one, the frames of what traces a program.
_NOT_THE_USER = frozenset({"jaxslowmo", "jax", "jaxlib", "optax", "contextlib", "functools"})


def warn_user(message: str) -> None:
    """Issue a `UserWarning` at the innermost line that is neither ours nor jax's or optax's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package_of(frame.f_globals) in _NOT_THE_USER:
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def warn_once() -> Callable[[str], None]:
    """A function that issues each message as a `UserWarning` the first time only."""
    seen: set[str] = set()

    def warn(message: str) -> None:
        if message not in seen:
            seen.add(message)
            warn_user(message)

    return warn


def _package_of(module_globals: dict[str, object]) -> str:
    return str(module_globals.get("__name__", "")).partition(".")[0]
