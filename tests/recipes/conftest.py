"""Recipes are users' programs, which may rely on promotion; those that log write to files alone."""

import os
from collections.abc import Iterator

import pytest

from support.promotion import standard

os.environ["WANDB_ERROR_REPORTING"] = "false"  # of the logger itself, over the network
os.environ["WANDB_SILENT"] = "true"


@pytest.fixture(scope="module", autouse=True)
def standard_promotion_of_users() -> Iterator[None]:
    """Allow promotion of ranks and dtypes, also to what runs once for all tests of a file."""
    with standard():
        yield
