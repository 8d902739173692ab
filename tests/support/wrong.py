"""Rows of tables of errors for calls that differ in one argument."""

from collections.abc import Callable
from typing import Any

from support.refusals import Refusal


def wrong(call: Callable[..., Any], **arguments: Any) -> dict[str, Refusal]:
    """Return a row for each argument: `call` with it alone must name it and its value."""
    return {
        f"{call.__name__}: {name}={value!r}": Refusal(
            lambda name=name, value=value: call(**{name: value}), f"`{name}`", value
        )
        for name, value in arguments.items()
    }
