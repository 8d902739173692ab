"""The example's files stand in no package: they are imported by their names."""

import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "dlrm"


@pytest.fixture(scope="session", autouse=True)
def example_on_the_path():
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="session")
def real_flights(example_on_the_path):
    """All flights of the package, split; they take more than a second to read."""
    import flights

    return flights.split()
