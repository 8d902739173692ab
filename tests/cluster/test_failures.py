"""Failures that are not deaths: some of `python tests/cluster/failures.py`, once each."""

import pytest
from faults import stand as stands
from faults import table as table
from faults.registry import attempt

# One of every kind.
SOME = (
    "disk full, freed after the first warning",
    "a save hangs where process 1 writes; SIGTERM to trainer 0",
    "exception in process 1, --restarts 3",
    "a process of three is killed",
)


@pytest.mark.parametrize("name", SOME)
def test_it_is_as_promised(name, tmp_path, programs, monkeypatch):
    # The times are promised for a machine that does little else, where `make test-failures` holds
    # them; beside other work it is the end itself that counts.
    monkeypatch.setattr(stands, "SLACK", 10.0)
    observed = attempt(name, tmp_path / "try", programs, seed=0)
    assert observed.broken is None, observed.broken
