"""Whether a process is one of several, and where process 0 listens."""

import socket

import pytest

from jaxslowmo.cli._config import ClusterConfig
from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli._processes import bind_address, is_one_of_several, known_processes

SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "2"}
K8S = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}
TPU = {"TPU_WORKER_HOSTNAMES": "t1k-w0,t1k-w1"}
GIVEN = {"coordinator": "h:1", "num_processes": 3, "process_id": 0}


@pytest.mark.parametrize(
    ("options", "environ", "several", "known"),
    [
        ({}, {}, False, None),
        ({}, SLURM, True, 4),
        ({}, {"SLURM_NTASKS": "4"}, False, None),  # in sbatch, before srun
        ({}, SLURM | {"SLURM_NTASKS": "1"}, False, None),
        ({}, OMPI, True, 2),
        ({}, K8S, True, None),
        ({}, TPU, True, None),
        (GIVEN, SLURM, True, 3),
        (GIVEN | {"num_processes": 1}, {}, False, 1),
    ],
)
def test_launchers(options, environ, several, known):
    config = ClusterConfig(**options)
    assert is_one_of_several(config, environ) is several
    assert known_processes(config, environ) == known


# From a block that is kept for documentation: of no host.
ELSEWHERE = "203.0.113.7"


def bound(place, *, process_id=0, bind=None):
    given = {"num_processes": 2, "process_id": process_id, "coordinator_bind": bind}
    return bind_address(ClusterConfig(coordinator=place, **given))


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """What the host's files and its name server would say."""
    real = socket.getaddrinfo

    def look_up(host, port, **options):
        if host == "no-such-host.test":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.1.1" if host == "debian.test" else host, port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_process_0_listens_at_the_coordinator_or_where_it_is_told(port):
    assert bound(f"localhost:{port}") == f"127.0.0.1:{port}"
    assert bound(f"localhost:{port}", bind="127.0.0.1") == f"127.0.0.1:{port}"
    assert bound(f"localhost:{port}", process_id=1) is None
    with pytest.warns(UserWarning, match=r"debian.test is 127.0.1.1"):  # this machine alone
        assert bound(f"debian.test:{port}") == f"127.0.1.1:{port}"
    bound(f"debian.test:{port}", process_id=1)


@pytest.mark.parametrize(
    ("place", "process_id"),
    [
        ("no-such-host.test:1234", 0),
        (f"{ELSEWHERE}:1234", 0),
        ("node0", 1),
        ("node0:65536", 1),
    ],
)
def test_what_cannot_be_an_address_is_refused(place, process_id):
    with pytest.raises(CommandError, match=f"--coordinator.* {place.partition(':')[0]}"):
        bound(place, process_id=process_id)


def test_a_port_that_another_program_has_is_refused(port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        bound(f"127.0.0.1:{port}", process_id=1)  # waits for process 0
        with pytest.raises(CommandError, match=f":{port}: Address already in use"):
            bound(f"127.0.0.1:{port}")
