"""What jax has under private names does what this package takes it for."""

import ast
import subprocess
import sys
from pathlib import Path

import jax

from jaxslowmo._support import private_jax

ROOT = Path(__file__).parents[2]


def _private(path: Path) -> set[str]:
    """Return the private modules of jax that a file imports."""
    nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
    names = [alias.name for x in nodes if isinstance(x, ast.Import) for alias in x.names]
    names += [
        f"{x.module}.{a.name}" for x in nodes if isinstance(x, ast.ImportFrom) for a in x.names
    ]
    return {name for name in names if name.startswith(("jax._src", "jaxlib."))}


def test_no_other_file_imports_a_private_module():
    own = Path(private_jax.__file__)
    for tree in ("jaxslowmo", "torch_compat"):
        for path in (ROOT / tree).rglob("*.py"):
            assert path == own or not _private(path), path


def test_effects_of_collectives_and_of_prints():
    def program(x):
        jax.debug.print("{}", x)
        return jax.lax.psum(x, "run")

    traced = jax.make_jaxpr(program, axis_env=[("run", 2)])(1.0)
    effects = [[*map(private_jax.is_axis_effect, eqn.effects)] for eqn in traced.eqns]
    assert effects == [[False], [True]]


def test_devices_start_when_they_are_asked_for():
    code = (
        "import jax; from jaxslowmo._support import private_jax as p; "
        "assert not p.has_devices(); p.leave_out_missing_tpu(); "
        "assert jax.devices('cpu') and p.has_devices() and not p.has_libtpu_without_tpu()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
