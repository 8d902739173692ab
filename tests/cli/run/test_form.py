"""Where a run lies: model, batches and bytes of the devices, of one process or of several."""

import typing

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli.config._training import (
    EXECUTORS,
    PIPELINES,
    PRESET_DEFAULTS,
    TrainConfig,
    train_config,
)
from jaxslowmo.cli.processes._peers import Cluster
from jaxslowmo.cli.run import _division
from jaxslowmo.cli.run._division import choose_mesh
from jaxslowmo.cli.run._recipes import form_of
from jaxslowmo.cli.run._recorder import ByteLedger
from jaxslowmo.data import read_corpus
from jaxslowmo.models import GPT_PRESETS
from jaxslowmo.pipeline import Executor
from support.refusals import Refusal, each

MESH = js.virtual_mesh({"replica": 2, "device": 2})


def config(mesh=None, **values):
    return train_config({"preset": "demo", "batch": 8, "mesh": mesh, **values})


def stacked_on(replicas, devices):
    return lambda: choose_mesh(
        TrainConfig(replicas=replicas, devices_per_replica=devices, batch=12), Cluster(0, 4)
    )


def form(**given):
    return lambda: form_of(config(**given))


REFUSED = {
    "replicas of 4 processes": Refusal(stacked_on(3, 1), "--replicas", 4, CommandError),
    "more than processes": Refusal(stacked_on(6, 2), "--replicas", 6, CommandError),
    "devices of 2 processes": Refusal(stacked_on(2, 1), "--devices-per-replica", 2, CommandError),
    "devices of 4 processes": Refusal(stacked_on(1, 6), "--devices-per-replica", 4, CommandError),
    "heads": Refusal(form(mesh="tensor=3"), "tensor", 3),
    "width": Refusal(form(mesh="fsdp=3", batch=6), "fsdp", 128),
    "layers": Refusal(form(mesh="stage=5"), "num_stages", 5),
    "chunks": Refusal(form(mesh="stage=2", pipeline="interleaved", chunks=3), "num_chunks", 3),
    "rounds of microbatches": Refusal(
        form(mesh="stage=4", pipeline="interleaved", microbatches=2), "microbatches", 2
    ),
}


@each(REFUSED)
def test_what_does_not_fit_is_refused(refusal):
    refusal.check()


def test_axes_stand_in_the_order_of_links():
    run = train_config({"mesh": "stage=2,fsdp=1, replica = 3,device=2", "batch": 4})
    assert [*run.axes.items()] == [("replica", 3), ("device", 2), ("stage", 2)]
    assert (run.replicas, run.devices_per_replica, run.devices_of_a_replica) == (3, 2, 4)
    assert train_config({"mesh": "fsdp=2"}).replicas == 1
    # Options are parsed without importing jax.
    assert typing.get_args(Executor) == EXECUTORS
    assert tuple(js.schedules.KINDS) == PIPELINES


@pytest.mark.parametrize(
    ("batch", "given", "count"),
    [
        (16, None, 8),  # four per stage
        (8, None, 4),  # of the two of fsdp each has half
        (6, None, 3),  # none that the stages divide
        (16, 2, 2),
    ],
)
def test_microbatches_divide_what_devices_compute_together(batch, given, count):
    values = {"mesh": "stage=2,fsdp=2", "batch": batch, "microbatches": given}
    assert train_config(values).num_microbatches == count
    assert train_config({"batch": batch, "replicas": 2}).num_microbatches == 1


def test_what_is_given_goes_before_the_preset_and_that_before_the_defaults():
    assert set(PRESET_DEFAULTS) == set(GPT_PRESETS)
    assert [train_config({"preset": preset}).preset for preset in GPT_PRESETS] == [*GPT_PRESETS]
    run = train_config({"preset": "demo", "steps": 77, "batch": None})
    assert (run.steps, run.batch, run.replicas) == (77, 4, 4)
    # A tenth of the schedule, since the preset's warm-up is for its own steps, or the preset's.
    warmups = [(77, None), (1, None), (40, 100), (300, None)]
    found = [train_config({"preset": "demo", "steps": s, "schedule_steps": n}) for s, n in warmups]
    assert [x.warmup for x in found] == [7, 0, 10, 16]
    assert [x.schedule_length for x in found] == [77, 1, 100, 300]
    assert found[2].not_given == ("warmup",)


@pytest.mark.parametrize(
    ("parts", "replicas", "rows"),
    [
        ((0, 1, 2, 3), (0, 1), [0, 1, 2, 3, 4, 5, 6, 7]),
        ((2, 3), (1,), [4, 5, 6, 7]),  # whole replicas
        ((1,), (0,), [2, 3]),  # a replica over processes
        ((1, 3), (0, 1), [2, 3, 6, 7]),
    ],
)
def test_a_process_makes_the_rows_of_its_devices(tmp_path, monkeypatch, parts, replicas, rows):
    words = np.random.default_rng(0).integers(97, 123, size=(10, 8000), dtype=np.uint8)
    for i, letters in enumerate(words):
        (tmp_path / f"{i}.txt").write_bytes(letters.tobytes())
    run = TrainConfig(replicas=2, devices_per_replica=2, batch=4, data=str(tmp_path))
    corpus = read_corpus(run.data)
    text = _division.divide_text(run, corpus, MESH)
    assert text.replicas == (0, 1)
    batch = _division.RunBatches(text, run, MESH).batch(3)
    held = {("replica",): replicas, ("replica", "device"): parts}
    monkeypatch.setattr(_division, "own_parts", lambda mesh, axes: held[axes])
    text = _division.divide_text(run, corpus, MESH)
    assert text.replicas == replicas
    batches = _division.RunBatches(text, run, MESH)
    np.testing.assert_array_equal(batches.batch(3), batch[rows])
    batches.position = 3
    np.testing.assert_array_equal(next(batches), batch[rows])
    assert batches.position == batches.get_state() == 4


def test_bytes_of_events_that_no_kind_holds_together_add_up():
    ledger = ByteLedger({"local": 1, "average": 11, "slow": 101})
    assert [ledger.add(p) for p in ((), ("average",), ("average", "slow"))] == [1, 12, 123]
    assert ByteLedger({"every": 5}).add(()) == 5
    gossip = ByteLedger({"local": 1, "round 0": 11, "round 1": 21})
    assert [gossip.add(p) for p in (("round 0",), ("round",))] == [11, 32]
    joined = ByteLedger({"local": 0, "average": 10, "slow": 100, "average+slow": 105})
    assert joined.add(("slow", "average")) == 105


def test_leaves_lie_by_the_axes_of_the_model():
    alone = form_of(config("replica=2,device=2"))
    assert (alone.specs, alone.layout) == (None, None)
    specs = form_of(config("fsdp=2,tensor=2")).specs
    assert specs["blocks"][0]["qkv"]["kernel"] == P("fsdp", "tensor")
