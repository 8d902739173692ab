"""Changes drawn from the package are single, parse, and are the same for the same seed."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mutants(monkeypatch):
    """The tool, imported as a script imports its neighbours; its name is free again afterwards."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import mutants

    yield mutants
    for name in ("mutants", "lines"):
        sys.modules.pop(name, None)


TEXT = '''
def f(a: dict[str, int], b=1):
    """Not 2."""
    if a[b] < 3 and g(a, b):
        a[b - 1] += 1
    return [x + 1 for x in a if x is not None]
'''
CHANGES = {
    ("constant", "2"), ("comparison", "((a[b]) <= (3))"), ("operator", "((a[b] < 3) or (g(a, b)))"),
    ("swapped arguments", "g(b, a)"), ("operator", "((b) + (1))"), ("dropped statement", "pass"),
    ("dropped statement", "return None"), ("comparison", "((x) is (None))"),
    ("negated condition", "(not (x is not None))"),
}  # fmt: skip


def test_a_change_of_each_kind_stands_where_it_says_and_a_seed_draws_the_same(mutants):
    found = mutants.Changes("f.py", TEXT).found
    assert {(m.kind, m.after) for m in found} >= CHANGES
    for mutant in found:
        changed = mutants.changed(TEXT, mutant)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(TEXT))
        assert changed.count("Not 2.") == 1
        assert "dict[str, int]" in changed
    one, again, other = (mutants.draw(seed, 20, ["jaxslowmo/tree"]) for seed in (1, 1, 2))
    assert one == again
    assert len(set(one)) == 20
    assert one != other
