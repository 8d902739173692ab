"""The tools that compare two checkouts: the same scenarios every time, and no difference missed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def outcome(tmp_path, name, **arrays):
    from differential.outcomes import outcome_of

    return outcome_of(lambda: {k: np.asarray(v) for k, v in arrays.items()}, tmp_path / name)


def test_scenarios_are_those_of_their_seed():
    from differential.drawing import drawn

    few, many = drawn(20), drawn(200)
    assert few.items() <= many.items()
    command = [sys.executable, "-c", "from differential.drawing import drawn; print(drawn(20))"]
    again = subprocess.run(
        command, cwd=ROOT / "tools", capture_output=True, text=True, check=True
    ).stdout
    assert again.strip() == str(few)


def test_a_changed_bit_is_told_with_its_size_and_another_structure_is_said(tmp_path):
    import ml_dtypes
    from differential.outcomes import differences

    half = np.array([1, 2], ml_dtypes.bfloat16)
    before = outcome(tmp_path, "before", **{"params/w": [1.0, 2.0], "metrics/loss": half})
    same = outcome(tmp_path, "same", **{"params/w": [1.0, 2.0], "metrics/loss": half})
    other = outcome(tmp_path, "other", **{"params/w": [1.0, 2.5], "metrics/loss": 2 * half})
    assert differences(before, same) == ([], "")
    assert differences(before, other)[0] == [
        "params: 1 of 1 leaves differ, most params/w by 0.5",
        "metrics: 1 of 1 leaves differ, most metrics/loss by 2",
    ]
    zero, minus = (outcome(tmp_path, str(x), **{"params/w": x}) for x in (0.0, -0.0))
    assert differences(zero, minus)[0] == ["params: 1 of 1 leaves differ, most params/w by 0"]
    before = outcome(tmp_path, "before", **{"opt_state/.a": 1, "params/w": 1.0})
    now = outcome(tmp_path, "now", **{"opt_state/.b": 1, "params/w": 2.0})
    lines, note = differences(before, now)
    assert lines == ["params: 1 of 1 leaves differ, most params/w by 1"]
    assert note == "opt_state has another structure (1 leaves gone, 1 new): not compared"
