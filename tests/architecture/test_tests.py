"""A newcomer finds the test of a file: by its name, or in the table of tests/README.md."""

from pathlib import Path

import pytest

from architecture import tests
from architecture.small_tree import make_tree

ROOT = Path(__file__).parents[2]
OWN = {f"tests/{name}.py": "" for name in ("tree/test_x", "tree/test_y", "mesh/test_b")}
ROW = "| `tree/_y.py`, `train/_ckpt.py` | `train/test_run.py` |\n"
RUN = {"tests/train/test_run.py": ""}


def test_every_source_has_a_test():
    assert tests.untested(ROOT) == []


def test_every_row_of_the_table_is_needed():
    assert tests.dead_rows(ROOT) == []
    assert len(tests.table(ROOT)) > 10


def test_a_source_without_is_found(tmp_path):
    root = make_tree(tmp_path, OWN)
    (found,) = tests.untested(root)
    assert found.startswith("train/_ckpt.py has no train/test_ckpt.py")
    make_tree(root, {"tests/train/test_ckpt.py": ""})
    assert tests.untested(root) == tests.dead_rows(root) == []


def test_a_row_stands_for_its_sources(tmp_path):
    root = make_tree(tmp_path, OWN | RUN | {"tests/README.md": ROW})
    (root / "tests/tree/test_y.py").unlink()
    assert tests.untested(root) == tests.dead_rows(root) == []


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (OWN | RUN, "tree/_y.py, which has a test of its name"),
        ({"tests/tree/test_x.py": ""}, "train/test_run.py, which is not there"),
        (RUN | {"tests/README.md": ROW.replace("_ckpt", "_gone")}, "train/_gone.py, which is not"),
    ],
)
def test_dead_rows_are_found(tmp_path, files, said):
    root = make_tree(tmp_path, {"tests/README.md": ROW} | files)
    assert any(said in line for line in tests.dead_rows(root))
