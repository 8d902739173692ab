"""Four hosts for all tests; the tests fail where they cannot be built.

A file of tests that needs one thing more is left out where that is missing, and the end of
the output says so.
"""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import Host, hosts, missing

collect_ignore = [] if shutil.which("mpirun") else ["test_mpirun.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which tests were left out."""
    for file in collect_ignore:
        terminalreporter.line(f"{file} was left out, and not passed: `mpirun` is missing.")


@pytest.fixture(scope="session", autouse=True)
def terminated_is_interrupted() -> Iterator[None]:
    """A polite kill ends the run as Ctrl-C does: with what it built removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def four_hosts() -> Iterator[list[Host]]:
    """Hosts with links of 1 Gbit/s."""
    if lacks := missing():
        pytest.fail(f"not run, and not passed: missing here: {', '.join(lacks)}", pytrace=False)
    with hosts(4, "1gbit") as found:
        yield found


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one start has compiled, for all others."""
    return tmp_path_factory.mktemp("programs")
