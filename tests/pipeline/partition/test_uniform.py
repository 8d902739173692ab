"""Partitions equal ColossalAI's on every recorded case."""

import json

import pytest

import jaxslowmo as js
from support.bad_input import warning_messages
from support.golden_peers import FOLDER

CASES = json.loads((FOLDER / "pipeline_partition.json").read_text())["cases"]


def split(case):
    fn = getattr(js, case["fn"])
    what = case["num_items"] if case["fn"] == "partition_uniform" else case["weights"]
    return fn(what, case["pp_size"], case["num_chunks"])


def test_all_cases_are_here():
    assert len(CASES) == 86
    assert {case["fn"] for case in CASES} == {"partition_uniform", "partition_balanced"}
    assert sum("error" in case for case in CASES) == 4
    assert sum(bool(case.get("warnings")) for case in CASES) == 5


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_equal_to_colossalai(case):
    if "error" in case:
        with pytest.raises(ValueError, match=r"must be a multiple of `num_chunks`=\d, got \d+ lay"):
            split(case)
        return
    found = []
    messages = warning_messages(lambda: found.append(split(case)))
    assert found == [[[tuple(block) for block in blocks] for blocks in case["parts"]]]
    assert len(messages) == case["warnings"]


def test_a_warning_says_which_stages_hold_nothing():
    first, second = warning_messages(lambda: js.partition_uniform(6, 5, 2))
    assert first == "partition_uniform: 2 of 5 stages hold no layer in chunk 0, which has 3."
    assert "chunk 1" in second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2), "`num_items` must be an int >= 1, got 0"),
        ((4.0, 2), "`num_items` must be an int >= 1, got 4.0"),
        ((4, 0), "`num_stages` must be an int >= 1, got 0"),
        ((4, True), "`num_stages` must be an int >= 1, got True"),
        ((4, 2, -1), "`num_chunks` must be an int >= 1, got -1"),
    ],
)
def test_counts_must_be_positive(arguments, message):
    with pytest.raises(ValueError, match=f"partition_uniform: {message}"):
        js.partition_uniform(*arguments)
