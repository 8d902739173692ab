"""Recipes are users' programs, which may rely on promotion."""

from collections.abc import Iterator

import pytest

from support.promotion import standard


@pytest.fixture(scope="module", autouse=True)
def standard_promotion_of_users() -> Iterator[None]:
    """Allow promotion of ranks and dtypes, also to what runs once for all tests of a file."""
    with standard():
        yield
