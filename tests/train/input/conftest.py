"""Threads of other tests are not those that a test of pipelines looks for."""

import pytest

from train.input.small import forget_loaders


@pytest.fixture(autouse=True)
def only_own_loaders() -> None:
    """What other suites have left running in this process stays out of sight."""
    forget_loaders()
