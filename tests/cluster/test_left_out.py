"""What a machine lacks for one test leaves out that test alone, and the last lines say so."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WITHOUT_MPIRUN = (
    "test-cluster: test_mpirun.py was left out, and not passed: `mpirun` (openmpi-bin) is missing."
)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder that is all of PATH, with what the suite itself calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("ip", "tc"):
        (folder / name).symlink_to(shutil.which(name))
    return folder


def outcome(tools: Path, *command: str) -> tuple[int, list[str]]:
    env = {**os.environ, "PATH": str(tools)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=HERE, env=env, **pipes)
    return done.returncode, done.stdout.splitlines()


def test_without_mpirun_only_its_test_is_left_out_and_the_last_line_says_so(tools):
    assert outcome(tools, sys.executable, "namespaces.py") == (0, [WITHOUT_MPIRUN])
    collect = (sys.executable, "-m", "pytest", "--collect-only", "-q")
    code, lines = outcome(tools, *collect, "test_mpirun.py", "test_bytes.py")
    assert (code, lines[-1]) == (0, WITHOUT_MPIRUN)
    assert "(1 deselected)" in lines[-2]
    assert not any(line.startswith("test_mpirun.py::") for line in lines)
    (tools / "mpirun").symlink_to("/bin/true")
    assert outcome(tools, sys.executable, "namespaces.py") == (0, [])
