"""Four hosts for all tests; the tests fail where they cannot be built.

A file of tests that needs one thing more is left out where that is missing, and the last line of
the output says so.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import Host, hosts, left_out, missing

_LAST_LINES = pytest.StashKey[list[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, by name, the tests that this machine cannot run."""
    lines = left_out()
    absent = [item for item in items if item.path.name in lines]
    items[:] = [item for item in items if item not in absent]
    config.hook.pytest_deselected(items=absent)
    config.stash[_LAST_LINES] = [lines[name] for name in sorted({i.path.name for i in absent})]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Say after the summary which tests were left out."""
    for line in config.stash.get(_LAST_LINES, []):
        print(line)


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
