"""No circles of imports, and no imports of what is private to another package."""

from pathlib import Path

import pytest

from architecture import imports
from architecture.small_tree import make_tree

ROOT = Path(__file__).parents[2]


def test_no_files_import_each_other():
    assert imports.circle_violations(ROOT) == []


def test_packages_use_what_others_offer():
    assert imports.privacy_violations(ROOT) == []


def test_a_clean_tree_has_no_violations(tmp_path):
    root = make_tree(tmp_path, {})
    assert imports.circle_violations(root) == []
    assert imports.privacy_violations(root) == []


@pytest.mark.parametrize(
    "text",
    [
        "from ._x import f",
        "from . import _x",
        "from . import f",
        "import jaxslowmo.tree._x",
        "from jaxslowmo.tree import f",
        "def g():\n    from ._x import f",
        "if TYPE_CHECKING:\n    from ._x import f",
        "from ._z import g",
    ],
)
def test_a_circle_is_found(tmp_path, text):
    """`_x` imports `_y`; imports for types, those inside of functions and ways around count."""
    files = {"jaxslowmo/tree/_y.py": text, "jaxslowmo/tree/_z.py": "from ._x import f"}
    found = imports.circle_violations(make_tree(tmp_path, files))
    assert len(found) == 1, found
    assert "jaxslowmo/tree/_x.py -> jaxslowmo/tree/_y.py" in found[0]


def test_each_circle_is_told_once(tmp_path):
    files = {"torch_compat/a.py": "from . import b", "torch_compat/b.py": "from . import a"}
    assert imports.circle_violations(make_tree(tmp_path, files)) == [
        "a circle: torch_compat/a.py -> torch_compat/b.py -> torch_compat/a.py"
    ]


@pytest.mark.parametrize(
    ("name", "text", "target"),
    [
        ("jaxslowmo/mesh/_b.py", "from ..tree._x import f", "jaxslowmo.tree._x.f"),
        ("jaxslowmo/mesh/_b.py", "from ..tree import _x", "jaxslowmo.tree._x"),
        ("jaxslowmo/mesh/_b.py", "def g():\n    import jaxslowmo.tree._x", "jaxslowmo.tree._x"),
        ("jaxslowmo/mesh/sub/_b.py", "from ...tree._x import f", "jaxslowmo.tree._x.f"),
        ("jaxslowmo/_api.py", "from .tree._x import f", "jaxslowmo.tree._x.f"),
        ("torch_compat/a.py", "from jaxslowmo.tree._x import f", "jaxslowmo.tree._x.f"),
        ("torch_compat/a.py", "from .sub._x import f", "torch_compat.sub._x.f"),
    ],
)
def test_a_private_import_is_found(tmp_path, name, text, target):
    root = make_tree(tmp_path, {name: text, "torch_compat/sub/__init__.py": ""})
    (found,) = imports.privacy_violations(root)
    assert f"{target} is private to {target.partition('._')[0]}" in found


def test_what_is_private_to_a_package_is_open_to_its_folders(tmp_path):
    files = {"jaxslowmo/tree/sub/_a.py": "from .._x import f", "jaxslowmo/_api.py": "import jax"}
    files["jaxslowmo/mesh/_b.py"] = "from .._support.types import T\nfrom ..tree import __all__"
    assert imports.privacy_violations(make_tree(tmp_path, files)) == []
