"""A small repository that keeps every rule, to be broken in one place."""

from pathlib import Path

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
    """The repository, with `files` added or replaced."""
    clean = {
        "jaxslowmo/__init__.py": LAZY,
        "jaxslowmo/__main__.py": "from jaxslowmo.cli import main\nmain()\n",
        "jaxslowmo/_api.py": '"""Names."""\nfrom .mesh import make as make\n',
        "jaxslowmo/_support/types.py": "import jax\n",
        "jaxslowmo/tree/__init__.py": '"""Trees."""\nfrom ._x import f as f\n',
        "jaxslowmo/tree/_x.py": "import jax\nfrom .._support.types import T\nfrom . import _y\n",
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
