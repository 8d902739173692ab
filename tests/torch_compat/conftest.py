"""The process that runs these tests never touches a device: devices live in its children."""

import os
from importlib import import_module
from pathlib import Path

import pytest
from models import TRACED_ONCE
from slowmo_spawned import BACKENDS

# Before torch_xla is imported, which would otherwise choose, and warn about it.
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if TRACED_ONCE:
    # Not started, but read: each device process would do it anew.
    import_module("torch_compat.on_jax.device_process")


HERE = Path(__file__).parent
# What needs no torch_xla, but for `slowmo/xla`; tests of groups hold with torch_xla loaded, too.
WITHOUT_XLA = ("slowmo", "peers", "examples/test_train_torchrun.py", "test_meeting.py")
IN_BOTH = ("slowmo/xla", "slowmo/backends/test_distributed.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what `make test-torchax` runs, so that `make test-torch` need not."""
    for item in items:
        path = str(item.path.relative_to(HERE))
        by = item.callspec.params.get("by") if hasattr(item, "callspec") else None
        if path.startswith(WITHOUT_XLA) and not path.startswith(IN_BOTH) and by != "torch_xla":
            item.add_marker("without_xla")


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
