"""A module that needs an extra which is not installed says which, and how to get it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxslowmo._support.extras import missing_extra, needed_by

ROOT = Path(__file__).parents[2]
_TEXTS = {".ipynb", ".md", ".py", ".sh", ".yaml"}
_FROM_AN_INDEX = re.compile(r"pip install (-\S+ )*['\"]?jaxslowmo\b(?!\[\w+\] @)")
# Say of an installed package how it gets an extra.
_ADD_AN_EXTRA = {
    ROOT / "jaxslowmo/_support/extras.py",
    ROOT / "torch_compat/errors.py",
    ROOT / "tests/on_jax/test_torchax.py",
    ROOT / "docs/start.md",
}


@pytest.mark.parametrize(
    ("statement", "package", "extra"),
    [
        ("import jaxslowmo.checkpoint", "orbax", "jaxslowmo[train]"),
        ("import jaxslowmo.models", "flax", "jaxslowmo[train]"),
        (
            "import jaxslowmo as js; js.islands.join('run', name='a')",
            "obstore",
            "jaxslowmo[islands]",
        ),
        ("from torch_compat import TPUManager", "torch", "jaxslowmo[torch]"),
        ("from torch_compat import on_jax", "torch", "jaxslowmo[torchax]"),
    ],
)
def test_an_import_without_the_extra_says_what_to_install(statement, package, extra):
    code = (
        f"import sys\nsys.modules[{package!r}] = None\n"  # as if it were not installed
        f"try:\n    {statement}\n"
        "except ModuleNotFoundError as error:\n    print(error.name, error, sep='|')"
    )
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, capture_output=True, text=True, check=True, cwd=ROOT)
    name, said = done.stdout.strip().split("|")
    assert name.partition(".")[0] == package
    assert f"needs {package}" in said
    assert f"pip install '{extra}'" in said


def test_a_module_of_no_extra_is_a_bug_and_not_explained_away():
    with (
        pytest.raises(ModuleNotFoundError, match=r"^No module named 'nonsense'$"),
        needed_by("this"),
    ):
        import nonsense  # noqa: F401
    assert missing_extra("this", ModuleNotFoundError(name="numpy.nonsense")) is None
    assert missing_extra("this", ModuleNotFoundError()) is None


def test_nothing_else_tells_to_install_from_an_index():
    """Other texts name a checkout, a wheel or an address, from which a first install can come."""
    texts = [path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"]
    for folder in ("benchmarks", "colab", "docs", "examples", "jaxslowmo", "torch_compat"):
        found = (path for path in (ROOT / folder).rglob("*") if path.suffix in _TEXTS)
        texts += [path for path in found if path not in _ADD_AN_EXTRA]
    assert len(texts) > 200
    for path in texts:
        assert not _FROM_AN_INDEX.search(path.read_text("utf-8")), path
