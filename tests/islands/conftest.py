"""The lines that islands log, as a list."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The lines that islands log from here on, with the islands' names."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("jaxslowmo.islands"), Keep()
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
