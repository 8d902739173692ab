"""Tables of errors: a call that is refused, the argument that the message names, and its value.

A message is free to change its words. What a user needs of it is which argument is wrong and what
was given, so a row holds these and no sentence.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest


class Refusal(NamedTuple):
    """A call that must raise.

    Attributes:
      call: takes no arguments.
      argument: what the message must contain: the name of the wrong argument, leaf, axis or file.
      value: what else it must contain, as text: the value that was given. Empty if there is none.
      error: the class of the exception.
    """

    call: Callable[[], object]
    argument: str
    value: object = ""
    error: type[Exception] = ValueError

    def check(self) -> None:
        """Make the call; fail unless it raises as stated."""
        with pytest.raises(self.error) as caught:
            self.call()
        message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert self.argument in message, message
        assert str(self.value) in message, message


def each(rows: Mapping[str, Refusal]) -> pytest.MarkDecorator:
    """Return the mark that runs a test once for every row, as its argument `refusal`."""
    # Every worker must give a row the same name, and an address is another in each process.
    names = [re.sub(r" at 0x\w+", "", name) for name in rows]
    return pytest.mark.parametrize("refusal", rows.values(), ids=names)
