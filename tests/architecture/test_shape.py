"""What files, functions and folders look like: re-exports, sizes, comments."""

from pathlib import Path

import pytest

from architecture import shape
from architecture.small_tree import LAZY, make_tree

ROOT = Path(__file__).parents[2]


def test_package_inits_only_reexport():
    assert shape.reexport_violations(ROOT) == []


def test_no_file_grows_beyond_its_limit():
    assert shape.length_violations(ROOT) == []


def test_no_folder_holds_too_many_files():
    assert shape.folder_violations(ROOT) == []


def test_few_functions_are_long():
    assert shape.function_violations(ROOT) == []


def violations(root: Path) -> list[str]:
    return [
        *shape.reexport_violations(root),
        *shape.length_violations(root),
        *shape.folder_violations(root),
        *shape.function_violations(root),
        *shape.comment_violations(root),
    ]


def test_a_clean_tree_has_no_violations(tmp_path):
    assert violations(make_tree(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("jaxslowmo/__init__.py", '"""T."""\nif True:\n    x = 1', "no logic"),
        ("jaxslowmo/__init__.py", f"{LAZY}\n    x = 1", "no logic"),
        ("jaxslowmo/__init__.py", LAZY.replace("__dir__", "helper"), "no logic"),
        ("jaxslowmo/__init__.py", LAZY.replace("import *", "import make"), "no logic"),
        ("jaxslowmo/__init__.py", LAZY.replace("TYPE_CHECKING", "DEBUG"), "no logic"),
        ("jaxslowmo/_api.py", '"""N."""\nimport jax', "no logic"),
        ("jaxslowmo/_api.py", '"""N."""\nfrom .mesh import make', "re-export as `make as make`"),
        ("jaxslowmo/mesh/__init__.py", LAZY, "no logic"),
        ("jaxslowmo/mesh/__init__.py", '"""M."""\ndef f(): ...', "no logic"),
        ("jaxslowmo/mesh/__init__.py", '"""M."""\nfrom ._b import f', "re-export as `f as f`"),
        ("jaxslowmo/mesh/__init__.py", "", "says in a docstring"),
        ("tests/test_x.py", "\n" * 401, "401 lines"),
    ],
)
def test_a_violation_is_found(tmp_path, name, text, message):
    found = violations(make_tree(tmp_path, {name: text}))
    assert any(message in line for line in found), found


def test_a_crowded_folder_is_found(tmp_path):
    files = {f"torch_compat/slowmo/_{i}.py": "" for i in range(14)}
    files["torch_compat/slowmo/__init__.py"] = ""
    assert violations(make_tree(tmp_path, files)) == []
    (found,) = violations(make_tree(tmp_path, {"torch_compat/slowmo/_x.py": ""}))
    assert found == "torch_compat/slowmo has 15 files, more than 14"


def _function(name: str, lines: int) -> str:
    return f'def {name}():\n    """Text."""\n' + "    x = 1\n" * (lines - 1)


def test_long_functions_are_found(tmp_path):
    """Methods too; docstrings do not count, a function inside of another counts into it."""
    pair = _function("long", 61) + _function("short", 60)
    root = make_tree(tmp_path, {f"jaxslowmo/tree/_{i}.py": pair for i in range(5)})
    assert violations(root) == []
    nested = "class C:\n    def method(self):\n        def inner():\n" + "            x = 1\n" * 59
    make_tree(tmp_path, {"torch_compat/data.py": nested})
    found = violations(root)
    assert len(found) == 6
    assert "jaxslowmo/tree/_0.py long: 61 lines" in found
    assert "torch_compat/data.py method: 61 lines" in found


@pytest.mark.parametrize(
    ("comments", "is_enough"), [(7, False), (8, True), (12, True), (13, False)]
)
def test_comments_are_counted(tmp_path, comments, is_enough):
    """Behind code or alone; a docstring is neither comment nor code."""
    alone, behind = comments // 2, comments - comments // 2
    lines = ['"""Text.', "# no comment", '"""', *["# why"] * alone]
    lines += ["x = 1  # why"] * behind + ["", "y = '#'"] * (50 - behind)
    root = make_tree(tmp_path, {"jaxslowmo/transform/_a.py": "\n".join(lines)})
    make_tree(tmp_path, {"jaxslowmo/algorithms/_b.py": "z = 1\n" * 50})
    assert shape.comments_per_100_lines(root) == comments
    assert (shape.comment_violations(root) == []) == (8 <= comments <= 12)


def test_algorithms_are_explained():
    assert shape.comment_violations(ROOT) == []
