"""The process that runs these tests never touches a device: devices live in its children."""

import os
from importlib import import_module

import pytest
from slowmo_spawned import BACKENDS

from models import TRACED_ONCE

# Before torch_xla is imported, which would otherwise choose, and warn about it.
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if TRACED_ONCE:
    # Not started, but read: each device process would do it anew.
    import_module("torch_compat.on_jax.device_process")


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
