"""The process that runs these tests never touches an XLA device: devices live in its children."""

import os

import pytest
from slowmo_spawned import BACKENDS

# Before torch_xla is imported, which would otherwise choose, and warn about it.
os.environ.setdefault("PJRT_DEVICE", "CPU")


@pytest.fixture(autouse=True)
def _environment_of_before():
    """A number of devices, once configured, is in the environment of what later tests start."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(params=BACKENDS)
def by(request):
    """What connects the processes of a test."""
    return request.param
