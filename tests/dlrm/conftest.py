"""The example's files stand in no package: they are imported by their names."""

import importlib.util
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


@pytest.fixture(scope="session")
def command(example_on_the_path):
    """The module of `python examples/dlrm/train.py`; by path, since these tests have a `train`."""
    spec = importlib.util.spec_from_file_location("dlrm_train", EXAMPLE / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
