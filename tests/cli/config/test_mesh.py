"""Axes of the devices by one option: read, and held against what others say."""

import typing

import pytest

from jaxslowmo.cli.config._mesh import EXECUTORS, parse_mesh
from jaxslowmo.cli.config._options import refuse_unused
from jaxslowmo.cli.config._training import train_config
from jaxslowmo.pipeline import Executor


def test_axes_are_read_in_the_order_of_links():
    assert list(parse_mesh("tensor=2, stage=3,replica = 4").items()) == [
        ("replica", 4), ("stage", 3), ("tensor", 2)
    ]  # fmt: skip
    config = train_config({"mesh": "stage=2,fsdp=1,replica=3,device=2", "batch": 4})
    assert (config.replicas, config.devices_per_replica) == (3, 2)
    assert config.axes == {"replica": 3, "device": 2, "stage": 2}
    assert config.devices_of_a_replica == 4
    assert train_config({"mesh": "fsdp=2"}).replicas == 1


def test_the_executors_are_those_of_the_library():
    assert typing.get_args(Executor) == EXECUTORS


@pytest.mark.parametrize(
    ("batch", "given", "count"),
    [
        (16, None, 8),  # four per stage
        (8, None, 4),  # of the two of fsdp each has half
        (12, None, 6),
        (6, None, 3),  # none that the stages divide
        (16, 2, 2),
    ],
)
def test_microbatches_divide_what_devices_compute_together(batch, given, count):
    values = {"mesh": "stage=2,fsdp=2", "batch": batch, "microbatches": given}
    assert train_config(values).num_microbatches == count
    assert train_config({"batch": batch, "replicas": 2}).num_microbatches == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mesh": "replica=2", "replicas": 4}, "--mesh and --replicas contradict each other"),
        (
            {"mesh": "device=2", "devices_per_replica": 4},
            "--mesh and --devices-per-replica contradict",
        ),
        ({"mesh": "fsdp=3"}, "multiple of --accumulate times the sizes of device and fsdp"),
        ({"mesh": "stage=2", "microbatches": 3}, "--microbatches must divide the 8 windows"),
        (
            {"pipeline": "cosine"},
            "--rate-schedule that of the learning rate; got --sch",
        ),
        ({"mesh": "replica"}, "sizes of axes such as replica=2,stage=2,fsdp=2, got replica"),
    ],
)
def test_what_does_not_go_together_is_refused(values, words):
    with pytest.raises(ValueError, match=words):
        train_config(values)


def test_the_same_said_twice_is_no_contradiction():
    config = train_config({"mesh": "replica=2,fsdp=2", "replicas": 2})
    assert config.axes == {"replica": 2, "fsdp": 2}


@pytest.mark.parametrize("name", ["pipeline", "microbatches", "chunks", "executor"])
def test_options_of_stages_want_stages(name):
    given = {"mesh": "fsdp=2", name: {"pipeline": "gpipe", "executor": "host"}.get(name, 1)}
    with pytest.raises(ValueError, match=r"goes with a stage of 2 or more in --mesh; got"):
        refuse_unused(given, train_config(given))
