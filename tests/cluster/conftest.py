"""Four hosts for all tests; the tests fail where they cannot be built."""

import signal
from collections.abc import Iterator

import pytest
from namespaces import Host, hosts, missing

NUM_HOSTS = 4


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
    with hosts(NUM_HOSTS, "1gbit") as found:
        yield found
