"""Which devices run the replicas, of one process or of several."""

import os
import re

import pytest

from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli.config._training import TrainConfig, train_config
from jaxslowmo.cli.processes._peers import Cluster
from jaxslowmo.cli.run._division import ask_for_devices, choose_mesh


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


def test_stages_that_the_host_dispatches_take_one_process():
    config = train_config({"mesh": "replica=2,stage=2", "batch": 4, "executor": "host"})
    with pytest.raises(CommandError, match=r"--executor host .* got 4 processes: use --executor"):
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
