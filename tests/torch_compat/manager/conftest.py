"""Time for device processes to end by themselves: on a busy machine they need more than usual."""

import pytest

from support.waiting import PATIENCE_SECONDS
from torch_compat.manager import _manager


@pytest.fixture(autouse=True)
def _patient_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `shutdown` wait long, so that exit codes say how processes ended."""
    monkeypatch.setattr(_manager, "_END_SECONDS", (PATIENCE_SECONDS,) * 3)
