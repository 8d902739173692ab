"""Arguments that are one of a few names."""

from typing import Any, get_args


def check_choice(argument: str, value: Any, kind: Any, owner: str = "") -> None:
    """Raise `ValueError` unless `value` is one of the names in `kind`, a `Literal` of strings.

    `owner` is a public name for the message; "" leaves it out.
    """
    if not isinstance(value, str) or value not in get_args(kind):
        *others, last = (f'"{name}"' for name in get_args(kind))
        rule = f"`{argument}` must be {', '.join(others)} or {last}, got {value!r}."
        raise ValueError(f"{owner}: {rule}" if owner else rule)
