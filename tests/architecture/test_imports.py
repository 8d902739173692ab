"""Packages import from lower floors, what is public, in no circles, and what the core installs."""

import re
from pathlib import Path

import pytest

from architecture.floors import FLOORS, floor_violations
from architecture.imports import PACKAGE, circle_violations, privacy_violations

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
# A small repository that keeps every rule, to be broken in one place.
CLEAN = {
    "jaxslowmo/__init__.py": "if TYPE_CHECKING:\n    from .mesh import make as make",
    "jaxslowmo/__main__.py": "from jaxslowmo.cli import main",
    "jaxslowmo/_support/types.py": "import jax",
    "jaxslowmo/tree/__init__.py": "from ._x import f as f",
    "jaxslowmo/tree/_x.py": "import jax\nfrom .._support.types import T\nfrom . import _y",
    "jaxslowmo/tree/_y.py": "",
    "jaxslowmo/topology/__init__.py": "import numpy",
    "jaxslowmo/mesh/__init__.py": "",
    "jaxslowmo/mesh/_b.py": "from jaxslowmo.tree import f, __all__\nfrom .. import topology",
    "jaxslowmo/train/__init__.py": "def save():\n    import orbax.checkpoint",
    "jaxslowmo/cli/__init__.py": "import tyro\nimport jaxslowmo as js",
    "torch_compat/__init__.py": "if TYPE_CHECKING:\n    from . import on_jax",
    "torch_compat/manager.py": "import torch\nfrom jaxslowmo.topology import ring",
    "torch_compat/on_jax/__init__.py": "import torchax.tensor\nimport jaxslowmo as js",
    "torch_compat/on_jax/_a.py": "",
}


def violations(root: Path) -> list[str]:
    return [*floor_violations(root), *circle_violations(root), *privacy_violations(root)]


def made(root: Path, files: dict[str, str]) -> Path:
    for name, text in (CLEAN | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_the_project_keeps_the_rules_and_so_does_a_clean_tree(tmp_path):
    assert violations(ROOT) == violations(made(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("jaxslowmo/tree/_x.py", "def f():\n    import jaxslowmo.mesh", "_x.py:2 tree must not"),
        ("jaxslowmo/__init__.py", "from .mesh import make", "the top level must not import mesh"),
        ("jaxslowmo/__init__.py", "def f():\n    from .cli import g", "must not import cli"),
        ("jaxslowmo/gossip/__init__.py", "", "jaxslowmo/gossip has no floor"),
        ("jaxslowmo/topology/_g.py", "def f():\n    import jax", "plain Python and NumPy, not jax"),
        ("jaxslowmo/train/_c.py", "import orbax.checkpoint", "orbax is no dependency"),
        ("torch_compat/reader.py", "import jaxslowmo", "jaxslowmo.topology, not jaxslowmo"),
        ("torch_compat/manager.py", "from . import on_jax", "loads on_jax before it is used"),
        # Circles: imports for types, inside of functions and ways around count.
        ("jaxslowmo/tree/_y.py", "if TYPE_CHECKING:\n    from ._x import f", "tree/_x.py <- jax"),
        ("jaxslowmo/mesh/_b.py", "from ..tree._x import f", "f is private to jaxslowmo.tree"),
    ],
)  # fmt: skip
def test_a_violation_is_found(tmp_path, name, text, message):
    found = violations(made(tmp_path, {name: text}))
    assert any(message in line for line in found), found


def test_contributing_has_the_table_of_the_floors():
    rows = re.findall(r"^\| (-?\d+) \| `(\w+)(?:\.py)?` \| \S.*\|$", CONTRIBUTING, re.MULTILINE)
    packages = {path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")}
    assert {name: int(floor) for floor, name in rows} == {name: FLOORS[name] for name in packages}
