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
def programs(tmp_path: Path) -> Path:
    """A folder that is all of PATH, with what the suite itself and `.ci/run` call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("ip", "tc", "env", "dirname", "bash"):
        (folder / name).symlink_to(shutil.which(name))
    return folder


def add(programs: Path, **scripts: str) -> None:
    for name, script in scripts.items():
        path = programs / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)


def outcome(programs: Path, *command: str, cwd: Path = HERE) -> tuple[int, list[str]]:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PATH": str(programs)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout.splitlines()


def test_without_mpirun_only_its_test_is_left_out_and_the_last_line_says_so(programs):
    assert outcome(programs, sys.executable, "namespaces.py") == (0, [WITHOUT_MPIRUN])
    collect = (sys.executable, "-m", "pytest", "--collect-only", "-q")
    code, lines = outcome(programs, *collect)
    assert code == 0
    assert lines[-1] == WITHOUT_MPIRUN
    assert "(1 deselected)" in lines[-2]
    assert not any(line.startswith("test_mpirun.py::") for line in lines)
    add(programs, mpirun="exit 0")
    assert outcome(programs, sys.executable, "namespaces.py") == (0, [])
    code, lines = outcome(programs, *collect, "test_mpirun.py")
    assert code == 0
    assert "1 test collected" in lines[-1]


def checked(programs: Path, **scripts: str) -> tuple[int, list[str]]:
    """What `.ci/run` ends with and prints where every step is one line."""
    steps = {"make": 'echo "make $1"', "id": "echo 0", "python3.12": "exit 0"}
    add(programs, **{**steps, **scripts})
    (programs / "python3").unlink(missing_ok=True)
    (programs / "python3").symlink_to(sys.executable)
    return outcome(programs, "bash", str(ROOT / ".ci" / "run"), cwd=ROOT)


def test_checks_install_open_mpi_where_they_may(programs):
    mpirun = programs / "mpirun"
    script = f'echo "apt-get $*"; case "$*" in *install*) /bin/ln -s /bin/true {mpirun};; esac'
    code, lines = checked(
        programs, apt_get=f"[ $DEBIAN_FRONTEND = noninteractive ] || exit 9; {script}"
    )
    assert code == 0
    update, install = (line for line in lines if line.startswith("apt-get"))
    assert update.endswith(" update")
    assert install.endswith(" install -y --no-install-recommends openmpi-bin")
    assert "make test-cluster" in lines
    assert lines[-1] == "== passed"


@pytest.mark.parametrize("apt", ["exit 100", None])
def test_checks_go_on_without_open_mpi_and_say_so_last(programs, apt):
    code, lines = checked(programs, **({"apt_get": apt} if apt else {}))
    assert code == 0
    assert "make test-cluster" in lines
    last = lines[lines.index("== passed") + 1 :]
    failed = ["left out: openmpi-bin could not be installed."] if apt else []
    assert last == [*failed, f"left out: {WITHOUT_MPIRUN}"]


def test_checks_without_the_cluster_say_so_last_and_ask_for_nothing(programs):
    (programs / "ip").unlink()
    code, lines = checked(programs, id="echo 1000", apt_get="echo asked")
    assert code == 0
    assert "make test-cluster" not in lines
    assert "asked" not in lines
    assert lines[-1] == (
        "left out: test-cluster: not run, and not passed: missing here: `ip` (iproute2)."
    )


def test_checks_that_fail_say_so_last(programs):
    code, lines = checked(programs, mpirun="exit 0", make='[ "$1" = lint ] && exit 3; echo $1')
    assert code == 3
    assert lines[-1] == "== FAILED"
