"""Every operation and module of torch, with torch's own samples: values and gradients are torch's.

`outcomes.txt` says of each that all of its calls agree, which operations some of them are refused
by, or how one differs. `pytest sweep` makes one call of each operation and of every fourth module,
for modules are made of operations, `pytest sweep -m exhaustive` all.
"""

import pytest
import torch
from trials import TOLERANCES, listed, op_db, outcomes, subjects

MOST_THAT_DIFFER, FEWEST_THAT_DO_NOT = 10, 560
LISTED = listed()
MODULES = [name for name in LISTED if name.startswith("Module ")]
OPERATIONS = [name for name in LISTED if name not in MODULES]


def test_the_list_has_every_operation():
    assert len(op_db) > FEWEST_THAT_DO_NOT
    assert LISTED.keys() == subjects().keys()
    kinds = [LISTED[name].partition(" ")[0].rstrip(":") for name in OPERATIONS]
    assert {*kinds} <= {"agrees", "refused", "differs"}
    assert kinds.count("differs") <= MOST_THAT_DIFFER
    assert len(kinds) - kinds.count("differs") >= FEWEST_THAT_DO_NOT


def unlisted(name: str, found: dict[str, list[str]]) -> dict[str, list[str]]:
    """The calls whose outcomes the list does not have."""
    outcome = LISTED[name]
    if outcome.startswith("differs"):
        return {}
    refused = outcome.removeprefix("refused ").split(", ")
    known = {"agrees", *(f"refused {operation}" for operation in refused)}
    return {what: calls for what, calls in found.items() if what not in known}


@pytest.mark.parametrize("name", [*OPERATIONS, *MODULES[::4]])
def test_one_call(name):
    assert not unlisted(name, outcomes(name, torch.float32, 1))


@pytest.mark.parametrize("name", [*LISTED][::24])
def test_one_call_in_half_precision(name):
    assert not unlisted(name, outcomes(name, torch.bfloat16, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LISTED)
def test_all_calls(name):
    found = {dtype: outcomes(name, dtype) for dtype in TOLERANCES}
    for calls in found.values():
        assert not unlisted(name, calls)
    if not LISTED[name].startswith("agrees"):  # it still does so
        assert any(what != "agrees" for calls in found.values() for what in calls)
