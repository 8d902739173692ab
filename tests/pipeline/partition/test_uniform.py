"""Partitions equal ColossalAI's on every recorded case; what its rule keeps for any weights."""

import json

import pytest

import jaxslowmo as js
from support.bad_input import warning_messages
from support.golden_peers import FOLDER

CASES = json.loads((FOLDER / "pipeline_partition.json").read_text())["cases"]


@pytest.mark.parametrize("name", ["partition_uniform", "partition_balanced"])
def test_equal_to_colossalai(name):
    of_name = [case for case in CASES if case["fn"] == name]
    assert len(of_name) == {"partition_uniform": 24, "partition_balanced": 62}[name]
    for case in of_name:
        what = case["num_items"] if name == "partition_uniform" else case["weights"]

        def split(case=case, what=what):
            return getattr(js, name)(what, case["pp_size"], case["num_chunks"])

        if "error" in case:
            with pytest.raises(ValueError, match=f"`num_chunks`={case['num_chunks']}"):
                split()
            continue
        found = []
        messages = warning_messages(lambda split=split, found=found: found.append(split()))
        assert found == [[[tuple(block) for block in blocks] for blocks in case["parts"]]]
        assert len(messages) == case["warnings"]


def test_a_warning_says_which_stages_hold_nothing():
    first, second = warning_messages(lambda: js.partition_uniform(6, 5, 2))
    assert all(words in first for words in ("2 of 5 stages", "chunk 0", "has 3"))
    assert "chunk 1" in second


def test_any_integers_are_weights():
    """Sums of these overflow NumPy's integers."""
    assert js.partition_balanced((w * 2**60 for w in [5, 1, 1, 1, 4]), 2) == [[(0, 2)], [(2, 5)]]
