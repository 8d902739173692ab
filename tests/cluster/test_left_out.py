"""What a machine lacks for one test leaves out that test alone, and the last lines say so."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WITHOUT_MPIRUN = (
    "test-cluster: test_mpirun.py was left out, and not passed: `mpirun` (openmpi-bin) is missing."
)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder that is all of PATH, with what the suite itself and `.ci/run` call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("ip", "tc", "env", "dirname", "bash"):
        (folder / name).symlink_to(shutil.which(name))
    (folder / "python3").symlink_to(sys.executable)
    add(folder, make='echo "make $1"', id="echo 0", python3_12="exit 0")
    return folder


def add(tools: Path, **scripts: str) -> None:
    for name, script in scripts.items():
        path = tools / {"python3_12": "python3.12"}.get(name, name.replace("_", "-"))
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)


def outcome(tools: Path, *command: str, cwd: Path = HERE) -> tuple[int, list[str]]:
    env = {**os.environ, "PATH": str(tools)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=cwd, env=env, **pipes)
    return done.returncode, done.stdout.splitlines()


def test_without_mpirun_only_its_test_is_left_out_and_the_last_line_says_so(tools):
    assert outcome(tools, sys.executable, "namespaces.py") == (0, [WITHOUT_MPIRUN])
    collect = (sys.executable, "-m", "pytest", "--collect-only", "-q")
    code, lines = outcome(tools, *collect, "test_mpirun.py", "test_bytes.py")
    assert (code, lines[-1]) == (0, WITHOUT_MPIRUN)
    assert "(1 deselected)" in lines[-2]
    assert not any(line.startswith("test_mpirun.py::") for line in lines)
    add(tools, mpirun="exit 0")
    assert outcome(tools, sys.executable, "namespaces.py") == (0, [])


def checked(tools: Path) -> tuple[int, list[str]]:
    """What `.ci/run` ends with and prints where every step is one line."""
    return outcome(tools, "bash", str(ROOT / ".ci" / "run"), cwd=ROOT)


def test_checks_install_open_mpi_where_they_may_and_go_on_without(tools):
    link = f"/bin/ln -s /bin/true {tools / 'mpirun'}"
    add(tools, apt_get=f'echo "apt-get $*"; case "$*" in *install*) {link};; esac')
    code, lines = checked(tools)
    assert (code, lines[-1]) == (0, "== passed")
    update, install = (line for line in lines if line.startswith("apt-get"))
    assert update.endswith(" update")
    assert install.endswith(" install -y --no-install-recommends openmpi-bin")
    assert "make test-cluster" in lines
    (tools / "mpirun").unlink()
    add(tools, apt_get="exit 100")
    code, lines = checked(tools)
    assert code == 0
    assert "make test-cluster" in lines
    failed = "left out: openmpi-bin could not be installed."
    assert lines[-3:] == ["== passed", failed, f"left out: {WITHOUT_MPIRUN}"]


def test_checks_without_the_cluster_and_checks_that_fail_say_so_last(tools):
    (tools / "ip").unlink()
    add(tools, id="echo 1000", apt_get="echo asked")
    code, lines = checked(tools)
    assert code == 0
    assert not {"make test-cluster", "asked"} & {*lines}
    lacks = "test-cluster: not run, and not passed: missing here: `ip` (iproute2)."
    assert lines[-1] == f"left out: {lacks}"
    add(tools, make='[ "$1" = test ] && exit 3')
    code, lines = checked(tools)
    assert (code, lines[-1]) == (3, "== FAILED")
