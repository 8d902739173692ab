"""What is missing is said, with the extra that has it."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules[{name!r}] = None
try:
    from torch_compat import on_jax
except ModuleNotFoundError as error:
    assert error.name == {name!r}, error.name
    assert "torch_compat.on_jax needs {name}" in str(error), error
    assert "pip install 'jaxslowmo[torchax]'" in str(error), error
else:
    raise SystemExit("imported")
"""


@pytest.mark.parametrize("name", ["torchax", "jax", "torch"])
def test_a_missing_package(name):
    command = [sys.executable, "-c", PROGRAM.format(name=name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_torch_compat_loads_it_when_it_is_used():
    program = "import sys, torch_compat; print('torchax' in sys.modules, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr
