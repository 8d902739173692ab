"""What `jaxslowmo train` and `launch` know of several processes, without starting any."""

import os
import re

import jax
import pytest

from jaxslowmo.cli._cluster import Cluster
from jaxslowmo.cli._cluster_config import ClusterConfig
from jaxslowmo.cli._config import TrainConfig
from jaxslowmo.cli._devices import ask_for_devices, choose_mesh
from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli._launchers import is_one_of_several, known_processes
from jaxslowmo.cli._lost import describe_loss
from jaxslowmo.cli._train import lost_a_peer

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
    config = ClusterConfig(**options)
    assert is_one_of_several(config, environ) is several
    assert known_processes(config, environ) == known


# As jaxlib 0.10 and 0.12 print it.
FATAL = (
    "F1121 15:10:32.612967    8864 client.h:80] Terminating process because the JAX distributed "
    "service detected fatal errors. This most likely indicates that another task died"
)
SILENT = f"{FATAL} absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], None),
        (["Traceback (most recent call last):", "ValueError: no"], None),
        ([SILENT, "2", "The tasks have crashed."], "process 2 died or cannot be reached"),
        ([SILENT, "3, 1", ""], "processes 1 and 3 died or cannot be reached"),
        (
            [f"{FATAL} ABORTED: 1 unexpectedly tried to connect with a different incarnation."],
            "process 1 died or cannot be reached",
        ),
        ([SILENT, "0"], "process 0 (the coordinator) died or cannot be reached"),
        (
            [f"{FATAL} DEADLINE_EXCEEDED", "", "RPC: /xla.coordination.CoordinationService/Heartb"],
            "process 0 (the coordinator) died or cannot be reached",
        ),
        (
            [FATAL, "", "RPC: /xla.coordination.CoordinationService/RegisterTask"],
            "not all processes came together within --startup-timeout",
        ),
    ],
)
def test_what_the_runtime_says_of_a_lost_process(lines, words):
    assert describe_loss(lines) == words


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--processes", 2, "--", "compare"], "launch runs: jaxslowmo launch ... -- train ...;"),
        (["--processes", 2], "got nothing"),
        (["--processes", 2, "--", "train"], "train needs --out"),
        (["--processes", 2, "--", "train", "--out="], "train needs --out"),
        (["--processes", 0, "--", "train", "--out", "x"], "--processes must be >= 1, got 0"),
        (
            ["--processes", 2, "--", "train", "--out", "x", "--process-id=1", "--restarts", 2],
            "--process-id, --restarts of train: launch decides it",
        ),
    ],
)
def test_what_cannot_be_launched(call, argv, words):
    outcome = call("launch", *argv)
    assert outcome.code == 2
    assert words in outcome.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-processes", 2], "--coordinator, --process-id must be given too"),
        (
            ["--coordinator", "h", "--num-processes", 2, "--process-id", 0],
            "--coordinator must be HOST:PORT, got h",
        ),
        (
            ["--coordinator", "h:1", "--num-processes", 2, "--process-id", 2],
            "--process-id must be < --num-processes, got 2 and 2",
        ),
        (["--cluster", "pbs"], "--cluster must be one of auto, none, slurm"),
        (["--heartbeat-timeout", 1], "--heartbeat-timeout must be >= 2, got 1"),
        (["--on-nan", "ignore"], "--on-nan must be one of stop, rollback, got ignore"),
    ],
)
def test_what_cannot_be_trained(call, argv, words):
    outcome = call("train", *argv)
    assert outcome.code == 2
    assert words in outcome.err


@pytest.mark.parametrize(
    ("replicas", "devices", "words"),
    [
        (3, 1, "--replicas must be a multiple of the number of processes, 4, or divide it, got 3"),
        (6, 2, "--replicas must be a multiple of the number of processes, 4, or divide it, got 6"),
        (2, 1, "--devices-per-replica must be a multiple of 2: with --replicas 2 and 4 processes"),
        (1, 6, "--devices-per-replica must be a multiple of 4: with --replicas 1 and 4 processes"),
    ],
)
def test_devices_that_cannot_be_divided_among_processes(replicas, devices, words):
    config = TrainConfig(replicas=replicas, devices_per_replica=devices, batch=12)
    with pytest.raises(CommandError, match=re.escape(words)):
        choose_mesh(config, Cluster(0, 4))


APART = "--xla_disable_hlo_passes=cpu-all-reduce-combiner"


@pytest.mark.parametrize(
    ("processes", "before", "found"),
    [
        (1, "", []),
        (4, "", [APART]),
        (None, "--a=b", [APART]),  # a launcher knows
        (4, "--xla_disable_hlo_passes=fusion", ["--xla_disable_hlo_passes=fusion"]),
    ],
)
def test_all_reduces_stay_apart_between_processes(monkeypatch, processes, before, found):
    monkeypatch.setenv("XLA_FLAGS", before)
    ask_for_devices(TrainConfig(), processes)
    flags = os.environ["XLA_FLAGS"].split()
    assert [flag for flag in flags if "disable_hlo_passes" in flag] == found
    assert before in flags or not before


def chained(outer: Exception, cause: Exception) -> Exception:
    outer.__cause__ = cause
    return outer


GONE = jax.errors.JaxRuntimeError("INTERNAL: Barrier failed because: task is set to ERROR")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (GONE, True),
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), True),
        (chained(RuntimeError("the checkpoint could not be written"), GONE), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (chained(RuntimeError("the checkpoint could not be written"), OSError("full")), False),
        (ValueError("--replicas must be >= 1"), False),
    ],
)
def test_errors_that_a_lost_process_can_have_caused(error, lost):
    assert lost_a_peer(error) is lost
