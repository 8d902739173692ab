"""Orbax logs every file that it touches; a user's terminal is not the place for it."""

import logging
from pathlib import PurePath


def _is_error_or_foreign(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "orbax" not in PurePath(record.pathname).parts


def quiet_orbax() -> None:
    """Drop what orbax logs below errors; other users of the same logger keep theirs."""
    logger = logging.getLogger("absl")  # orbax logs through absl
    if _is_error_or_foreign not in logger.filters:
        logger.addFilter(_is_error_or_foreign)
