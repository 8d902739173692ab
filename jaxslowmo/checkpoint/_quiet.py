"""Orbax logs every file that it touches, and what it raises: not for a user's terminal."""

import logging
from pathlib import PurePath


def _is_foreign(record: logging.LogRecord) -> bool:
    return "orbax" not in PurePath(record.pathname).parts


def quiet_orbax() -> None:
    """Drop what orbax logs; other users of the same logger keep theirs.

    Its errors, too: a save that fails in the background is logged with its stack, and raised by the
    next `save`, `wait` or `close`.
    """
    logger = logging.getLogger("absl")  # orbax logs through absl
    if _is_foreign not in logger.filters:
        logger.addFilter(_is_foreign)
