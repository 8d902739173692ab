"""Which error of the operating system something came from, however it is wrapped."""

import errno

import pytest

from jaxslowmo._support.files import PASSING, io_errno


class Told(RuntimeError):
    errno = errno.ESTALE


def wrapped(inner: Exception) -> Exception:
    try:
        raise RuntimeError("outer") from inner
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
        (wrapped(OSError(errno.EIO, "I/O")), errno.EIO),
        (Told("as its attribute says"), errno.ESTALE),
        # Of tensorstore.
        (ValueError("RESOURCE_EXHAUSTED: Error writing \"a\" [os_error_code='28']"), 28),
        (wrapped(wrapped(ValueError("[os_error_code='110']"))), errno.ETIMEDOUT),
        (OSError("without a number"), None),
        (ValueError("28"), None),
        (None, None),
    ],
)
def test_number(error, number):
    assert io_errno(error) == number


def test_only_what_a_disk_or_file_server_may_get_over_passes():
    assert {errno.EIO, errno.ENOSPC, errno.ESTALE, errno.ETIMEDOUT} == PASSING
