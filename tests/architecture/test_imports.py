"""Packages import from lower floors, what is public, in no circles, and what the core installs."""

import re
from pathlib import Path

from architecture.floors import FLOORS, floor_violations
from architecture.imports import PACKAGE, circle_violations, privacy_violations

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_project_keeps_the_rules():
    checks = floor_violations, circle_violations, privacy_violations
    assert [line for check in checks for line in check(ROOT)] == []


def test_contributing_has_the_table_of_the_floors():
    rows = re.findall(r"^\| (-?\d+) \| `(\w+)(?:\.py)?` \| \S.*\|$", CONTRIBUTING, re.MULTILINE)
    packages = {path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")}
    assert {name: int(floor) for floor, name in rows} == {name: FLOORS[name] for name in packages}
