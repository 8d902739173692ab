"""The tools that compare two checkouts: the same scenarios every time, and no difference missed."""

import json
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


def test_a_changed_bit_is_told_with_its_size(tmp_path):
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
    zero, minus, nan = (
        outcome(tmp_path, str(x), **{"params/w": x}) for x in (0.0, -0.0, float("nan"))
    )
    assert differences(zero, minus)[0] == ["params: 1 of 1 leaves differ, most params/w by 0"]
    assert differences(zero, nan)[0] == ["params: 1 of 1 leaves differ, most params/w by inf"]


def test_another_structure_of_the_state_is_said_and_what_is_left_compared(tmp_path):
    from differential.outcomes import differences

    before = outcome(tmp_path, "before", **{"opt_state/.a": 1, "params/w": 1.0})
    now = outcome(tmp_path, "now", **{"opt_state/.b": 1, "params/w": 2.0})
    lines, note = differences(before, now)
    assert lines == ["params: 1 of 1 leaves differ, most params/w by 1"]
    assert note == "opt_state has another structure (1 leaves gone, 1 new): not compared"
    before = outcome(tmp_path, "before", **{"params/w": [1.0]})
    now = outcome(tmp_path, "now", **{"params/w": np.float32([1.0])})
    assert "another structure" in differences(before, now)[0][0]


def test_explained_differences_are_no_failure_and_others_are(tmp_path, capsys):
    import same_results

    before = {"step 1": {"by name": outcome(tmp_path, "before", **{"params/w": 1.0})}}
    now = {"step 1": {"by name": outcome(tmp_path, "now", **{"params/w": 2.0})}}
    file = tmp_path / "explained.txt"
    file.write_text("# reasons\nstep 1 | doubled\n")
    reasons = same_results.explanations(file)
    assert same_results.compared(before, now, reasons, 10) == []
    assert "step 1: explained: doubled" in capsys.readouterr().out
    assert same_results.compared(before, now, {}, 10) == ["step 1"]
    assert "params/w by 1" in capsys.readouterr().out
    spelled = {"step 1": {**before["step 1"], "js.chain": now["step 1"]["by name"]}}
    assert same_results.compared(before, spelled, {}, 10) == ["step 1"]


def test_programs_with_other_names_or_another_order_have_the_same_operations():
    import same_programs

    def programs(text):
        return {"programs": {"step": same_programs.described(text)}, "refused": {}}

    text = "%0 = stablehlo.add %a, %b : f32\n%1 = stablehlo.multiply %0, %0 : f32"
    other = "%9 = stablehlo.multiply %x, %x : f32\n%2 = stablehlo.add %9, %b : f32"
    wider = text.replace("multiply", "add")
    compared = same_programs.compared
    assert compared(programs(text), programs(text)) == [
        "1 of 1 programs have the same text, 0 the same operations, 0 others; 0 are in one "
        "checkout alone"
    ]
    assert compared(programs(text), programs(other))[0] == "step: the same operations"
    assert "'stablehlo.add': '1 -> 2'" in compared(programs(text), programs(wider))[0]
    gone = {"programs": {}, "refused": {"step": "AttributeError: no name"}}
    assert compared(gone, programs(text))[:2] == [
        "step: now only",
        "no program before: step: AttributeError: no name",
    ]


def test_a_table_of_steps_says_which_field_of_which_cell_differs(tmp_path):
    import step_table

    before = {"host, diloco, plain": {"update 1, params": "ab", "emitted": ["one", "two"]}}
    file = tmp_path / "table.json"
    file.write_text(json.dumps(before))
    before = step_table.table_of(file, "host, *", 1)
    assert step_table.table_of(file, "traced, *", 1) == {}
    assert step_table.differing(before, before) == []
    cell = {"update 1, params": "cd", "emitted": ["one", "three"], "error": "ValueError: no"}
    assert step_table.differing(before, {"host, diloco, plain": cell}) == [
        "host, diloco, plain: update 1, params: ab -> cd",
        "host, diloco, plain: emitted: ['two'] -> ['three']",
        "host, diloco, plain: error: nothing -> ValueError: no",
    ]
    assert len(step_table.differing(before, {})) == 2
