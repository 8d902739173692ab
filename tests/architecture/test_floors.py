"""Packages import only from lower floors, and at module level only what the core installs."""

from pathlib import Path

import pytest

from architecture import floors
from architecture.imports import PACKAGE
from architecture.small_tree import make_tree

ROOT = Path(__file__).parents[2]


def test_packages_import_only_from_lower_floors():
    assert floors.floor_violations(ROOT) == []


def test_torch_compat_imports_from_lower_floors_and_topology_only():
    assert floors.torch_compat_violations(ROOT) == []


def test_floors_cover_the_package():
    names = {p.parent.name for p in (ROOT / PACKAGE).glob("*/__init__.py")}
    assert names
    assert names <= set(floors.FLOORS)


def test_climbs():
    assert floors.climbs("collectives", "transform")
    assert floors.climbs("transform", "algorithms")
    assert floors.climbs("algorithms", "gradients")
    assert not floors.climbs("algorithms", "transform")
    assert not floors.climbs("algorithms", "topology")
    assert not floors.climbs("tree", "tree")


def violations(root: Path) -> list[str]:
    return [*floors.floor_violations(root), *floors.torch_compat_violations(root)]


def test_a_clean_tree_has_no_violations(tmp_path):
    assert violations(make_tree(tmp_path, {})) == []


def test_on_jax_may_need_jax_and_the_package(tmp_path):
    text = "import jax\nimport torchax.tensor\nimport jaxslowmo as js\nfrom ._b import f\n"
    lazy = "if TYPE_CHECKING:\n    from . import on_jax as on_jax\n"
    files = {"torch_compat/on_jax/_a.py": text, "torch_compat/__init__.py": lazy}
    assert violations(make_tree(tmp_path, files)) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("jaxslowmo/tree/_x.py", "from ..mesh import make", "tree must not import jaxslowmo.mesh"),
        ("jaxslowmo/tree/_x.py", "def f():\n    import jaxslowmo.mesh", "_x.py:2 tree must not"),
        ("jaxslowmo/tree/_x.py", "from jaxslowmo import mesh", "tree must not import"),
        ("jaxslowmo/tree/_x.py", "from .. import __version__", "tree must not import"),
        ("jaxslowmo/tree/_x.py", "import jaxslowmo", "tree must not import jaxslowmo"),
        ("jaxslowmo/tree/_x.py", "from ..topology import ring", "tree must not import"),
        ("jaxslowmo/mesh/_b.py", "from ..language import data", "mesh must not import"),
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
        ("jaxslowmo/topology/_g.py", "from .._support.types import T", "topology stands alone"),
        ("jaxslowmo/train/_ckpt.py", "import orbax.checkpoint", "orbax is not a core dependency"),
        ("torch_compat/data.py", "from jaxslowmo.tree import f", "not jaxslowmo.tree.f"),
        ("torch_compat/data.py", "import jaxslowmo", "not jaxslowmo"),
        ("torch_compat/data.py", "import jax", "has no jax"),
        ("torch_compat/data.py", "from . import manager", "data must not import"),
        ("torch_compat/slowmo/_a.py", "from ..data import f", "slowmo must not import"),
        ("torch_compat/worker.py", "from torch_compat import TPUManager", "worker must not import"),
        ("torch_compat/_a.py", "", "_a has no floor"),
        ("torch_compat/on_jax/_a.py", "import torch_xla", "torch_compat.on_jax has no torch_xla"),
        ("torch_compat/on_jax/_a.py", "import flax", "torch_compat.on_jax has no flax"),
        ("torch_compat/on_jax/_a.py", "from .. import manager", "on_jax must not import"),
        ("torch_compat/manager.py", "from . import on_jax", "loads on_jax before it is used"),
        ("torch_compat/__init__.py", "from .on_jax import f", "loads on_jax before it is used"),
        ("torch_compat/data.py", "import torchax", "has no torchax"),
    ],
)
def test_a_violation_is_found(tmp_path, name, text, message):
    found = violations(make_tree(tmp_path, {name: text}))
    assert any(message in line for line in found), found
