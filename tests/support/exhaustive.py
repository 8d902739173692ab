"""Parameters of sweeps: the usual run takes some cases, and `make test-exhaustive` takes all."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], is_usual: Callable[..., bool]) -> list[Any]:
    """Return `cases` for `pytest.mark.parametrize`, with unusual ones marked `exhaustive`.

    Args:
      cases: one value per case, or a tuple of several.
      is_usual: whether a case of these values is in the usual run; at least one must be.
    """
    parameters = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = () if is_usual(*values) else (pytest.mark.exhaustive,)
        parameters.append(pytest.param(*values, marks=marks))
    assert not all(case.marks for case in parameters)
    return parameters


def covering(options: dict[str, list[Any]], runs: int, seed: int) -> list[dict[str, Any]]:
    """Draw a value of every option for so many runs; each value is in at least one of them."""
    source, columns = random.Random(seed), []
    for values in options.values():
        column = (values * runs)[:runs]
        source.shuffle(column)
        columns.append(column)
    return [dict(zip(options, row, strict=True)) for row in zip(*columns, strict=True)]
