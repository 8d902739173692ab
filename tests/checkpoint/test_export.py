"""The consensus model on disk."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxslowmo as js
from jaxslowmo.checkpoint import (
    CheckpointError,
    consensus_extra,
    export_consensus,
    load_consensus,
)

PARAMS = {
    "layers": [{"w": np.arange(12.0, dtype=np.float32).reshape(2, 6)}],
    "scale": np.array([[1.0, 2.0], [3.0, 5.0]], jax.numpy.bfloat16),
}
MEAN = {
    "layers": [{"w": np.arange(3.0, 9.0, dtype=np.float32)}],
    "scale": np.array([2.0, 3.5], jax.numpy.bfloat16),
}
MESH = js.virtual_mesh({"replica": 2})


def same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert [x.dtype for x in jax.tree.leaves(a)] == [x.dtype for x in jax.tree.leaves(b)]


def test_it_comes_back_and_others_can_read_it_and_damage_is_noticed(tmp_path):
    path = tmp_path / "model"
    for name in ("model.7.orbax-checkpoint-tmp", "other.7.orbax-checkpoint-tmp"):
        (tmp_path / name / "state").mkdir(parents=True)  # as interrupted exports leave it
    export_consensus(path, jax.tree.map(lambda x: x * 0, PARAMS), mesh=MESH)
    assert consensus_extra(path) == {}
    export_consensus(path, PARAMS, mesh=MESH, extra={"step": 7})  # replaces it
    assert {x.name for x in tmp_path.iterdir()} == {"model", "other.7.orbax-checkpoint-tmp"}
    assert consensus_extra(path) == {"step": 7}
    same(load_consensus(path), MEAN)
    same(load_consensus(path, like=MEAN), MEAN)
    same(dict(ocp.PyTreeCheckpointer().restore(path / "state")), MEAN)

    record = path / "record" / "metadata"
    value = json.loads(record.read_text())
    for change in ({"jaxslowmo_consensus": 2}, {"prints": value["prints"][::-1]}):
        record.write_text(json.dumps(value | change))
        with pytest.raises(CheckpointError, match=r"format 2|is damaged"):
            load_consensus(path)
    record.write_text(json.dumps(value))
    file = max((p for p in path.rglob("d/*")), key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="damaged"):
        load_consensus(path)


def test_shares_weigh_the_replicas(tmp_path):
    shares = [(np.array([3, 1], np.float32), None), (np.array([0, 4], np.float32), PARAMS)]
    export_consensus(tmp_path / "model", PARAMS, mesh=MESH, shares=shares)
    weights = np.array([3, 5]) / 8
    expected = {
        "layers": [{"w": np.tensordot(weights, PARAMS["layers"][0]["w"], 1).astype(np.float32)}],
        "scale": np.array([2.25, 3.875], jax.numpy.bfloat16),
    }
    same(load_consensus(tmp_path / "model"), expected)
