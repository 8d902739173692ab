"""The layout of the source tree: floors, core imports, re-exports, file lengths."""

from pathlib import Path

import pytest

from architecture import rules

ROOT = Path(__file__).parents[2]


def test_packages_import_only_from_lower_floors():
    assert rules.floor_violations(ROOT) == []


def test_torch_compat_imports_from_lower_floors_and_topology_only():
    assert rules.torch_compat_violations(ROOT) == []


def test_package_inits_only_reexport():
    assert rules.reexport_violations(ROOT) == []


def test_no_file_grows_beyond_its_limit():
    assert rules.length_violations(ROOT) == []


def test_floors_cover_the_package():
    names = {p.parent.name for p in (ROOT / rules.PACKAGE).glob("*/__init__.py")}
    assert names
    assert names <= set(rules.FLOORS)


def test_climbs():
    assert rules.climbs("collectives", "algorithms")
    assert rules.climbs("algorithms", "pipeline")
    assert not rules.climbs("algorithms", "topology")
    assert not rules.climbs("tree", "tree")


LAZY = '''"""Top."""
from . import topology as topology
__version__ = "0"
if TYPE_CHECKING:
    from ._api import *
else:
    def __getattr__(name):
        from . import _api
    def __dir__(): ...
'''


def make_tree(root: Path, files: dict[str, str]) -> Path:
    """A small repository that keeps every rule, with `files` added or replaced."""
    clean = {
        "jaxslowmo/__init__.py": LAZY,
        "jaxslowmo/__main__.py": "from jaxslowmo.cli import main\nmain()\n",
        "jaxslowmo/_api.py": '"""Names."""\nfrom .mesh import make as make\n',
        "jaxslowmo/_typing.py": "import jax\n",
        "jaxslowmo/tree/__init__.py": '"""Trees."""\nfrom ._x import f as f\n',
        "jaxslowmo/tree/_x.py": "import jax\nfrom .._typing import T\nfrom . import _y\n",
        "jaxslowmo/tree/_y.py": "",
        "jaxslowmo/topology/__init__.py": '"""Graphs."""\nimport numpy\n',
        "jaxslowmo/mesh/__init__.py": '"""Meshes."""\n',
        "jaxslowmo/mesh/_b.py": "from jaxslowmo.tree import f\nfrom .. import topology\n",
        "jaxslowmo/train/__init__.py": '"""Training."""\n',
        "jaxslowmo/train/_ckpt.py": "def save():\n    import orbax.checkpoint\n",
        "jaxslowmo/cli/__init__.py": '"""Commands."""\nimport typer\nimport jaxslowmo as js\n',
        "torch_compat/__init__.py": "import torch\nfrom jaxslowmo.topology import ring\n",
    }
    for name, text in (clean | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def all_violations(root: Path) -> list[str]:
    return [
        *rules.floor_violations(root),
        *rules.torch_compat_violations(root),
        *rules.reexport_violations(root),
        *rules.length_violations(root),
    ]


def test_a_clean_tree_has_no_violations(tmp_path):
    assert all_violations(make_tree(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("jaxslowmo/tree/_x.py", "from ..mesh import make", "tree must not import jaxslowmo.mesh"),
        ("jaxslowmo/tree/_x.py", "def f():\n    import jaxslowmo.mesh", "_x.py:2 tree must not"),
        ("jaxslowmo/tree/_x.py", "from jaxslowmo import mesh", "tree must not import"),
        ("jaxslowmo/tree/_x.py", "from .. import __version__", "tree must not import"),
        ("jaxslowmo/tree/_x.py", "import jaxslowmo", "tree must not import jaxslowmo"),
        ("jaxslowmo/tree/_x.py", "from ..topology import ring", "tree must not import"),
        ("jaxslowmo/mesh/_b.py", "from ..data import text", "mesh must not import"),
        ("jaxslowmo/mesh/sub/_b.py", "from ...train import x", "mesh must not import"),
        ("jaxslowmo/__init__.py", '"""T."""\nfrom .cli import main as main', "the top level must"),
        ("jaxslowmo/__init__.py", '"""T."""\nfrom .mesh import make as make', "the top level must"),
        ("jaxslowmo/__init__.py", '"""T."""\nfrom ._api import f as f', "before a name is used"),
        ("jaxslowmo/__init__.py", '"""T."""\nimport jax', "the top level is plain Python"),
        ("jaxslowmo/tree/_x.py", "from .._api import make", "tree must not import"),
        ("jaxslowmo/cli/_a.py", "from .._api import make", "cli must not import"),
        ("jaxslowmo/_api.py", '"""N."""\nfrom .cli import main as main', "_api must not import"),
        ("jaxslowmo/gossip/__init__.py", '"""New."""', "gossip has no floor"),
        ("jaxslowmo/_helpers.py", "", "_helpers has no floor"),
        ("jaxslowmo/topology/_g.py", "def f():\n    import jax", "plain Python and NumPy, not jax"),
        ("jaxslowmo/topology/_g.py", "from .._typing import T", "topology stands alone"),
        ("jaxslowmo/train/_ckpt.py", "import orbax.checkpoint", "orbax is not a core dependency"),
        ("torch_compat/data.py", "from jaxslowmo.tree import f", "not jaxslowmo.tree.f"),
        ("torch_compat/data.py", "import jaxslowmo", "not jaxslowmo"),
        ("torch_compat/data.py", "import jax", "has no jax"),
        ("torch_compat/data.py", "from . import manager", "data must not import"),
        ("torch_compat/slowmo/_a.py", "from ..data import f", "slowmo must not import"),
        ("torch_compat/worker.py", "from torch_compat import TPUManager", "worker must not import"),
        ("torch_compat/_a.py", "", "_a has no floor"),
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
    found = all_violations(make_tree(tmp_path, {name: text}))
    assert any(message in line for line in found), found
