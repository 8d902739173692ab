"""CONTRIBUTING.md says what the tree is: its floors, and files that are there."""

import re
from pathlib import Path

from architecture.floors import FLOORS
from architecture.imports import PACKAGE

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (-?\d+) \| `(\w+)(?:\.py)?` \| \S.*\|$", re.MULTILINE)
# In backticks, with a slash, and not the placeholder of a name.
PLACE = re.compile(r"`([\w.]+(?:/[\w.]+)+/?|[\w]+/)`")
TASKS = [
    "graph",
    "kind of schedule",
    "hook",
    "algorithm",
    "flag of train",
    "launcher",
    "format of checkpoints",
]


def packages() -> set[str]:
    return {path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")} | {"_api"}


def test_the_table_of_floors_is_that_of_the_rules():
    table = {name: int(floor) for floor, name in ROW.findall(TEXT)}
    assert table == {name: FLOORS[name] for name in packages()}


def test_the_table_goes_down():
    floors = [int(floor) for floor, _ in ROW.findall(TEXT)]
    assert floors == sorted(floors, reverse=True)


def test_every_file_that_is_named_is_there():
    named = PLACE.findall(TEXT)
    assert len(named) > 30
    # Folders of packages are named without the package in the table.
    missing = [
        place
        for place in named
        if not (ROOT / place).exists()
        and not list((ROOT / PACKAGE).glob(f"*/{place}"))
        and place != "site/"
    ]
    assert missing == []


def test_each_task_has_its_list():
    lists = dict(re.findall(r"^### An? (.+)\n\n((?:.+\n)+)", TEXT, re.MULTILINE))
    assert list(lists) == TASKS
    for task, steps in lists.items():
        assert len(re.findall(r"^\d\. ", steps, re.MULTILINE)) >= 4, task
        assert "tests/" in steps, task
