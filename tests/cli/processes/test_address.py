"""Where process 0 listens, and what is refused before the runtime sees it."""

import socket
import threading

import pytest

from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli.config._cluster import ClusterConfig
from jaxslowmo.cli.processes import _address
from jaxslowmo.cli.processes._address import bind_address, refuse_taken_port

# From a block that is kept for documentation: of no host.
ELSEWHERE = "203.0.113.7"


def config(coordinator, *, process_id=0, bind=None) -> ClusterConfig:
    return ClusterConfig(
        coordinator=coordinator, num_processes=2, process_id=process_id, coordinator_bind=bind
    )


@pytest.fixture
def port():
    """One that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def names(monkeypatch):
    """What the host's files and its name server would say."""
    known: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def look_up(host, port, **options):
        if host.endswith(".test"):
            if host not in known:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [info for name in known[host] for info in real(name, port, **options)]
        return real(host, port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


@pytest.mark.parametrize(
    ("host", "bind", "listens"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "0.0.0.0", "0.0.0.0"),
        (ELSEWHERE, "0.0.0.0", "0.0.0.0"),
        # One of several is of this host.
        ("both.test", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_process_0_listens_at_the_coordinator_or_where_it_is_told(names, port, host, bind, listens):
    names["both.test"] = [ELSEWHERE, "127.0.0.1"]
    asked = config(f"{host}:{port}", bind=bind)
    assert bind_address(asked, {}) == f"{listens}:{port}"
    assert bind_address(config(f"{host}:{port}", bind=bind, process_id=1), {}) is None


def test_ipv6_stands_in_brackets(port, monkeypatch):
    # Not every machine has it.
    monkeypatch.setattr(_address, "_listening", lambda name, addresses: addresses[0])
    assert bind_address(config(f"[::1]:{port}"), {}) == f"[::1]:{port}"
    for bind in ("::", "[::]"):
        assert bind_address(config(f"127.0.0.1:{port}", bind=bind), {}) == f"[::]:{port}"


def test_a_name_of_this_machine_alone_is_a_warning(names, port):
    names["debian.test"] = ["127.0.1.1"]
    names["two.test"] = ["127.0.1.1", "0.0.0.0"]
    with pytest.warns(UserWarning, match=r"debian.test is 127.0.1.1 on this host, where no other"):
        assert bind_address(config(f"debian.test:{port}"), {}) == f"127.0.1.1:{port}"
    # No warning, which would be an error here: asked for, another address, of another process.
    bind_address(config(f"debian.test:{port}", bind="127.0.1.1"), {})
    assert bind_address(config(f"two.test:{port}"), {}) == f"0.0.0.0:{port}"
    bind_address(config(f"debian.test:{port}", process_id=1), {})
    bind_address(config(f"localhost:{port}"), {})


def test_what_the_environment_says_comes_before_the_coordinator(port):
    environ = {"JAX_COORDINATOR_BIND_ADDRESS": f"0.0.0.0:{port}"}
    assert bind_address(config(f"{ELSEWHERE}:{port}"), environ) == f"0.0.0.0:{port}"
    asked = config(f"{ELSEWHERE}:{port}", bind="127.0.0.1")
    assert bind_address(asked, environ) == f"127.0.0.1:{port}"


def test_under_a_launcher_the_port_is_in_the_environment():
    assert bind_address(ClusterConfig(), {}) is None
    asked = ClusterConfig(coordinator_bind="::")
    assert bind_address(asked, {"JAX_COORDINATOR_PORT": "1234"}) == "[::]:1234"
    with pytest.raises(CommandError, match="needs --coordinator, or JAX_COORDINATOR_PORT in the"):
        bind_address(asked, {})
    with pytest.raises(CommandError, match="port of JAX_COORDINATOR_PORT must be 1 to 65535"):
        bind_address(asked, {"JAX_COORDINATOR_PORT": "x"})


@pytest.mark.parametrize("process_id", [0, 1])
@pytest.mark.parametrize("host", ["no-such-host.test", "a..b"])
def test_a_host_without_address(names, host, process_id):
    with pytest.raises(CommandError, match=f"^--coordinator: {host} has no address: "):
        bind_address(config(f"{host}:1234", process_id=process_id), {})


@pytest.mark.parametrize("bind", [None, ELSEWHERE])
def test_an_address_of_another_host(port, bind):
    with pytest.raises(CommandError, match=rf"{ELSEWHERE}:{port} is not .*--coordinator-bind \("):
        bind_address(config(f"{ELSEWHERE}:{port}", bind=bind), {})


@pytest.mark.parametrize("bind", [None, "0.0.0.0"])
def test_a_port_that_is_taken(bind):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=f"port {port} of this host is taken by another"):
            bind_address(config(f"127.0.0.1:{port}", bind=bind), {})


# What the coordinator of jax 0.10 sends first.
SETTINGS = bytes.fromhex("000018040000000000000400400000000500400000000600004000fe0300000001")


@pytest.fixture
def answering(port):
    """Start a program at the port that says `first`; None: it is silent, b"": it closes."""
    kept, servers, threads = [], [], []

    def serve(server, first):
        while True:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            kept.append(connection)
            if first:
                connection.sendall(first)
            if first == b"":
                connection.close()

    def start(first):
        server = socket.create_server(("127.0.0.1", port))
        server.settimeout(0.1)  # a thread that waits in `accept` is not woken by `close`
        threads.append(threading.Thread(target=serve, args=(server, first), daemon=True))
        servers.append(server)
        threads[-1].start()

    yield start
    for each in servers:
        each.close()
    for each in threads:
        each.join()
    for each in kept:
        each.close()


@pytest.mark.parametrize(
    ("first", "what"),
    [
        (None, "does not answer as process 0 would"),
        (b"HTTP/1.1 505 \r\n", "answers b'HTTP/1.1 ', as process 0 would not"),
        (b"OK", "answers b'OK', as process 0 would not"),
    ],
)
def test_others_see_that_the_port_is_taken(port, answering, monkeypatch, first, what):
    monkeypatch.setattr(_address, "_ANSWER_SECONDS", 0.2)
    answering(first)
    expected = f"--coordinator: 127.0.0.1:{port} is taken by another program: it {what}"
    with pytest.raises(CommandError) as caught:
        refuse_taken_port(config(f"127.0.0.1:{port}", process_id=1))
    assert str(caught.value) == expected
    with pytest.raises(CommandError, match=f"port {port} of this host is taken"):
        refuse_taken_port(config(f"127.0.0.1:{port}"))


@pytest.mark.parametrize("first", [SETTINGS, b""], ids=["a coordinator", "a proxy before it"])
def test_others_wait_where_process_0_listens_or_may_come(port, answering, first):
    refuse_taken_port(config(f"127.0.0.1:{port}", process_id=1))  # nobody listens
    refuse_taken_port(config(f"127.0.0.1:{port}"))
    answering(first)
    refuse_taken_port(config(f"127.0.0.1:{port}", process_id=1))


def test_a_launcher_that_tells_the_coordinator_is_not_asked():
    refuse_taken_port(ClusterConfig())
