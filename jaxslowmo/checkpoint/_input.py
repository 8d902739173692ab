"""Checks of what callers give."""

import json
from collections.abc import Mapping
from typing import Any


def checked_json(owner: str, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """`extra` as it will come back.

    Raises:
      ValueError: it is no JSON.
    """
    try:
        return json.loads(json.dumps({} if extra is None else dict(extra)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{owner}: `extra` must be plain JSON: {error}.") from None
