"""The batches of a run, whichever processes its replicas lie on."""

import dataclasses

import numpy as np
import pytest

import jaxslowmo as js
from jaxslowmo.cli.config._training import TrainConfig
from jaxslowmo.cli.run import _division
from jaxslowmo.data import read_corpus

MESH = js.virtual_mesh({"replica": 2, "device": 2})


@pytest.fixture
def whole(tmp_path):
    """The configuration, its corpus, and batch 3 of all replicas: (8, window)."""
    words = np.random.default_rng(0).integers(97, 123, size=(40, 2000), dtype=np.uint8)
    for i, letters in enumerate(words):
        (tmp_path / f"{i}.txt").write_bytes(letters.tobytes())
    config = dataclasses.replace(
        TrainConfig(), replicas=2, devices_per_replica=2, batch=4, data=str(tmp_path)
    )
    corpus = read_corpus(config.data)
    text = _division.divide_text(config, corpus, MESH)
    assert text.replicas == (0, 1)
    return config, corpus, _division.RunBatches(text, config, MESH).batch(3)


@pytest.mark.parametrize(
    ("parts", "replicas", "rows"),
    [
        ((0, 1, 2, 3), (0, 1), [0, 1, 2, 3, 4, 5, 6, 7]),
        ((2, 3), (1,), [4, 5, 6, 7]),  # whole replicas
        ((1,), (0,), [2, 3]),  # a replica over processes
        ((1, 3), (0, 1), [2, 3, 6, 7]),
    ],
)
def test_a_process_makes_the_rows_of_its_devices(whole, monkeypatch, parts, replicas, rows):
    config, corpus, batch = whole
    held = {("replica",): replicas, ("replica", "device"): parts}
    monkeypatch.setattr(_division, "own_parts", lambda mesh, axes: held[axes])
    text = _division.divide_text(config, corpus, MESH)
    assert text.replicas == replicas
    batches = _division.RunBatches(text, config, MESH)
    np.testing.assert_array_equal(batches.batch(3), batch[rows])
    batches.position = 3
    np.testing.assert_array_equal(next(batches), batch[rows])
    assert batches.position == batches.get_state() == 4
