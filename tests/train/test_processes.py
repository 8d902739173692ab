"""Do the batches that several processes give fit together?"""

import re

from jaxslowmo.train._batches import Note, compare_notes
from jaxslowmo.train._process_comparison import Verdict

LEAVES = {"x": "float32[8,3]", "y": "int32[8]"}


def notes(*digests, **changed):
    return {i: Note(**({"call": 1, "problem": None, "leaves": LEAVES, "digests": d} | changed))
            for i, d in enumerate(digests)}  # fmt: skip


def test_what_is_said_of_notes():
    """Parts that differ are right, equal ones warn, and what makes no batch is an error."""
    assert compare_notes(notes({"0": "a"}, {"1": "b"})) == Verdict()
    assert compare_notes(notes({"0": "a"}, {"0": "a"})) == Verdict()  # of one part
    assert compare_notes(notes({}, {})) == Verdict()  # later, values are not compared
    assert compare_notes(notes({"whole": "a"}, {"whole": "a"})) == Verdict()
    alike = compare_notes(notes({"0": "a"}, {"1": "b"}, {"2": "a"}))
    assert alike.error is None
    assert "processes 0, 2 give the same data" in alike.warning
    same_part = notes({"0": "a", "1": "b"}, {"1": "c", "2": "d"})
    shared = notes({"0": "a", "shared": "s"}, {"1": "b", "shared": "t"})
    assert compare_notes(notes({"0": "a", "shared": "s"}, {"1": "b", "shared": "s"})) == Verdict()
    other_shape = {7: Note(1, None, {"x": "float32[4,3]"}, {})}
    many = {7: Note(1, None, {f"x{i}": "float32[1]" for i in range(40)}, {})}
    for given, wanted in (
        (same_part, r"processes 0 and 1 .* the same part"),
        (shared, "all examples share"),
        (notes(*({"whole": x} for x in "aab")), "processes 0 and 2"),
        (notes({}, {}) | other_shape, r"x: float32\[8,3\] on processes 0, 1, float32\[4,3\] on"),
        (notes({}, {}) | many, "; and 39 more. Pad"),
        (notes({}) | {1: Note(9, None, LEAVES, {})}, "0 in step 1, process 1 in step 9."),
        (notes({}) | {1: Note(1, "`batch`: ...", {}, {})}, "process 1: `batch`: ..."),
    ):
        assert re.search(wanted, compare_notes(given).error)
