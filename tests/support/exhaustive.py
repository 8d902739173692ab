"""Products of which the usual run takes some members, and `make test-all` all of them."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], is_usual: Callable[..., bool]) -> list[Any]:
    """`cases` for `pytest.mark.parametrize`; those that are not usual are marked `exhaustive`.

    Args:
      cases: a value each, or a tuple of several.
      is_usual: of the values of a case; some must be.
    """
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = () if is_usual(*values) else (pytest.mark.exhaustive,)
        found.append(pytest.param(*values, marks=marks))
    assert not all(case.marks for case in found)
    return found
