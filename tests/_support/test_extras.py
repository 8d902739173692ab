"""A module that needs an extra which is not installed says which, and how to get it."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxslowmo._support.extras import missing_extra, needed_by

ROOT = Path(__file__).parents[2]


# What needs what, and the extra that has it.
NEEDS = [
    ("import jaxslowmo.checkpoint", "orbax", "jaxslowmo[train]"),
    ("import jaxslowmo.models", "flax", "jaxslowmo[train]"),
    ("import jaxslowmo as js; js.islands.join('run', name='a')", "obstore", "jaxslowmo[islands]"),
    ("from torch_compat import TPUManager", "torch", "jaxslowmo[torch]"),
    ("from torch_compat import on_jax", "torch", "jaxslowmo[torchax]"),
]
PROGRAM = """
import sys
for statement, package in {needs}:
    sys.modules[package] = None  # as if it were not installed
    try:
        exec(statement)
    except ModuleNotFoundError as error:
        print(error.name, error, sep="|")
"""


def test_an_import_without_the_extra_says_what_to_install():
    code = PROGRAM.format(needs=[needs[:2] for needs in NEEDS])
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, capture_output=True, text=True, check=True, cwd=ROOT)
    for line, (_, package, extra) in zip(done.stdout.splitlines(), NEEDS, strict=True):
        name, said = line.split("|")
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
