"""`pip install .` brings jax, optax and numpy; using all names needs no more."""

import importlib.metadata

from architecture.fresh import run_python

EXTRAS = ["flax", "grain", "matplotlib", "orbax", "orbax.checkpoint", "rich", "typer"]


def test_import_works_without_the_extras():
    # None in sys.modules makes an import of that name fail as if it were not installed.
    code = "import sys; sys.modules.update(dict.fromkeys({})); from jaxslowmo import *"
    run_python(code.format(EXTRAS))


def test_import_does_not_load_installed_extras():
    code = f"from jaxslowmo import *; import sys; print([m for m in {EXTRAS} if m in sys.modules])"
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


def test_a_checkout_that_is_not_installed_has_a_version_of_its_own():
    code = (
        "from importlib import metadata\n"
        "def missing(name):\n    raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = missing\n"
        "import jaxslowmo; print(jaxslowmo.__version__)"
    )
    assert run_python(code) == "0+checkout"
