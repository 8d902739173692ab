"""Errors of the operating system, also those that come wrapped in a library's own."""

import errno
import re

# A disk that is full or a file server that does not answer may be well again in a minute.
PASSING = frozenset({errno.EIO, errno.ENOSPC, errno.ESTALE, errno.ETIMEDOUT})
# As tensorstore writes it, which raises errors without a number.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


def io_errno(error: BaseException | None) -> int | None:
    """The number of the operating system's error that an error is, or came from; None if of none.

    An error may tell its number itself, by an attribute `errno`.
    """
    while error is not None:
        number = getattr(error, "errno", None)
        if isinstance(number, int):
            return number
        if found := _OS_ERROR.search(str(error)):
            return int(found[1])
        error = error.__cause__ or error.__context__
    return None
