"""Whether a process is one of several, by its options and its environment."""

import pytest

from jaxslowmo.cli.config._cluster import ClusterOptions
from jaxslowmo.cli.processes._peers import is_one_of_several, known_processes

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
        ({}, SLURM | {"SLURM_NTASKS": "1"}, False, None),
        ({}, {"SLURM_NTASKS": "4"}, False, None),  # in sbatch, before srun
        ({}, OMPI, True, 2),
        ({}, K8S, True, None),
        ({}, TPU, True, None),
        ({}, {"TPU_WORKER_HOSTNAMES": "localhost"}, False, None),
        ({"cluster": "none"}, SLURM, False, 4),
        ({"cluster": "gcetpu"}, {}, True, None),
        (GIVEN, SLURM, True, 3),
        (GIVEN | {"num_processes": 1}, {}, False, 1),
    ],
)
def test_launchers(options, environ, several, known):
    config = ClusterOptions(**options)
    assert is_one_of_several(config, environ) is several
    assert known_processes(config, environ) == known
