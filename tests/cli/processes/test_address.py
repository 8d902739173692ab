"""Where process 0 listens, and what is refused before the runtime sees it."""

import socket

import pytest

from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli.config._cluster import ClusterOptions
from jaxslowmo.cli.processes import _address
from jaxslowmo.cli.processes._address import bind_address
from support.refusals import Refusal, each

# From a block that is kept for documentation: of no host.
ELSEWHERE = "203.0.113.7"


def config(coordinator, *, process_id=0, bind=None) -> ClusterOptions:
    return ClusterOptions(
        coordinator=coordinator, num_processes=2, process_id=process_id, coordinator_bind=bind
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def port():
    return free_port()


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """What the host's files and its name server would say."""
    known = {"both.test": [ELSEWHERE, "127.0.0.1"], "debian.test": ["127.0.1.1"]}
    known["two.test"] = ["127.0.1.1", "0.0.0.0"]
    real = socket.getaddrinfo

    def look_up(host, port, **options):
        if host.endswith(".test"):
            if host not in known:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [info for name in known[host] for info in real(name, port, **options)]
        return real(host, port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.parametrize(
    ("host", "bind", "listens"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        (ELSEWHERE, "0.0.0.0", "0.0.0.0"),
        ("both.test", "127.0.0.1", "127.0.0.1"),  # one of several is of this host
        ("two.test", None, "0.0.0.0"),
    ],
)
def test_process_0_listens_at_the_coordinator_or_where_it_is_told(port, host, bind, listens):
    assert bind_address(config(f"{host}:{port}", bind=bind), {}) == f"{listens}:{port}"
    assert bind_address(config(f"{host}:{port}", bind=bind, process_id=1), {}) is None


def test_ipv6_stands_in_brackets(port, monkeypatch):
    # Not every machine has it.
    monkeypatch.setattr(_address, "_listening", lambda name, addresses: addresses[0][0])
    assert bind_address(config(f"[::1]:{port}"), {}) == f"[::1]:{port}"
    for bind in ("::", "[::]"):
        assert bind_address(config(f"127.0.0.1:{port}", bind=bind), {}) == f"[::]:{port}"


def test_a_name_of_this_machine_alone_is_a_warning_unless_it_is_asked_for(port):
    with pytest.warns(UserWarning, match=r"debian.test is 127.0.1.1"):
        assert bind_address(config(f"debian.test:{port}"), {}) == f"127.0.1.1:{port}"
    bind_address(config(f"debian.test:{port}", bind="127.0.1.1"), {})
    bind_address(config(f"debian.test:{port}", process_id=1), {})
    bind_address(config(f"localhost:{port}"), {})


def test_what_the_environment_says_comes_before_the_coordinator(port):
    environ = {"JAX_COORDINATOR_BIND_ADDRESS": f"0.0.0.0:{port}"}
    assert bind_address(config(f"{ELSEWHERE}:{port}"), environ) == f"0.0.0.0:{port}"
    asked = config(f"{ELSEWHERE}:{port}", bind="127.0.0.1")
    assert bind_address(asked, environ) == f"127.0.0.1:{port}"
    # Under a launcher the port is there, too.
    assert bind_address(ClusterOptions(), {}) is None
    asked = ClusterOptions(coordinator_bind="::")
    assert bind_address(asked, {"JAX_COORDINATOR_PORT": "1234"}) == "[::]:1234"


def bound(host, environ=None, **options):
    return lambda: bind_address(config(f"{host}:{free_port()}", **options), environ or {})


def launched(**environ):
    return lambda: bind_address(ClusterOptions(coordinator_bind="::"), environ)


REFUSED = {
    "no address": Refusal(bound("no-such-host.test"), "--coordinator", "no-such-host.test"),
    "no name": Refusal(bound("a..b", process_id=1), "--coordinator", "a..b"),
    "another host": Refusal(bound(ELSEWHERE), "--coordinator-bind", ELSEWHERE),
    "bound to another host": Refusal(bound(ELSEWHERE, bind=ELSEWHERE), "--coordinator-bind"),
    "no port": Refusal(launched(), "JAX_COORDINATOR_PORT", "--coordinator"),
    "no number": Refusal(launched(JAX_COORDINATOR_PORT="x"), "JAX_COORDINATOR_PORT", "65535"),
}


@each({name: refusal._replace(error=CommandError) for name, refusal in REFUSED.items()})
def test_what_cannot_be_an_address_is_refused(refusal):
    refusal.check()


@pytest.mark.parametrize("bind", [None, "0.0.0.0"])
def test_a_port_that_another_program_has_is_refused(port, bind):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        bind_address(config(f"127.0.0.1:{port}", process_id=1), {})  # waits for process 0
        with pytest.raises(CommandError, match=f":{port} of this host: Address already in use"):
            bind_address(config(f"127.0.0.1:{port}", bind=bind), {})
