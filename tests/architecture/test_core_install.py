"""`pip install jaxslowmo` brings jax, optax and numpy; importing the package needs no more."""

import importlib.metadata
import subprocess
import sys

EXTRAS = ["flax", "grain", "matplotlib", "orbax", "orbax.checkpoint", "rich", "typer"]


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_works_without_the_extras():
    # None in sys.modules makes an import of that name fail as if it were not installed.
    run_python(f"import sys; sys.modules.update(dict.fromkeys({EXTRAS})); import jaxslowmo")


def test_import_does_not_load_installed_extras():
    code = f"import jaxslowmo, sys; print([m for m in {EXTRAS} if m in sys.modules])"
    assert run_python(code) == "[]"


def test_a_missing_extra_would_be_noticed():
    code = (
        "import sys; sys.modules['flax'] = None\n"
        "try:\n    import flax\n    print('imported')\n"
        "except ImportError:\n    print('missing')"
    )
    assert run_python(code) == "missing"


def test_version_is_that_of_the_installed_package():
    code = "import jaxslowmo; print(jaxslowmo.__version__)"
    assert run_python(code) == importlib.metadata.version("jaxslowmo")
