"""The consensus model on disk."""

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


def same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert [x.dtype for x in jax.tree.leaves(a)] == [x.dtype for x in jax.tree.leaves(b)]


def test_it_comes_back_and_others_can_read_it(tmp_path):
    mesh, path = js.virtual_mesh({"replica": 2}), tmp_path / "model"
    export_consensus(path, jax.tree.map(lambda x: x * 0, PARAMS), mesh=mesh)
    export_consensus(path, PARAMS, mesh=mesh, extra={"step": 7})  # replaces it
    assert consensus_extra(path) == {"step": 7}
    same(load_consensus(path), MEAN)
    same(load_consensus(path, like=MEAN), MEAN)
    same(dict(ocp.PyTreeCheckpointer().restore(path / "state")), MEAN)


def test_what_an_interrupted_one_left_is_removed(tmp_path):
    for name in ("model.7.orbax-checkpoint-tmp", "other.7.orbax-checkpoint-tmp"):
        (tmp_path / name / "state").mkdir(parents=True)
    export_consensus(tmp_path / "model", PARAMS, mesh=js.virtual_mesh({"replica": 2}))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"model", "other.7.orbax-checkpoint-tmp"}


def test_shares_weigh_the_replicas(tmp_path):
    mesh = js.virtual_mesh({"replica": 2})
    shares = [(np.array([3, 1], np.float32), None), (np.array([0, 4], np.float32), PARAMS)]
    export_consensus(tmp_path / "model", PARAMS, mesh=mesh, shares=shares)
    weights = np.array([3, 5]) / 8
    expected = {
        "layers": [{"w": np.tensordot(weights, PARAMS["layers"][0]["w"], 1).astype(np.float32)}],
        "scale": np.array([2.25, 3.875], jax.numpy.bfloat16),
    }
    same(load_consensus(tmp_path / "model"), expected)


def test_what_is_refused(tmp_path):
    mesh, path = js.virtual_mesh({"replica": 2}), tmp_path / "model"
    with pytest.raises(CheckpointError, match="no model that export_consensus wrote"):
        load_consensus(path)
    path.mkdir()
    (path / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match="no model that export_consensus wrote"):
        export_consensus(path, PARAMS, mesh=mesh)
    assert (path / "thesis.tex").exists()
    path = tmp_path / "other"
    export_consensus(path, PARAMS, mesh=mesh)
    like = {**MEAN, "scale": np.ones(3, np.float32)}
    with pytest.raises(CheckpointError, match=r"another model than `like`.*'scale', \[2\]"):
        load_consensus(path, like=like)
    file = max((p for p in path.rglob("d/*")), key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="damaged"):
        load_consensus(path)


def test_leaves_without_elements_are_named(tmp_path):
    """Orbax cannot store them, and the disk is not to blame."""
    params = {**PARAMS, "head": {"b": np.zeros((2, 0, 3), np.float32)}}
    with pytest.raises(ValueError, match=r"leaves of size 0: head/b\. Leave them out"):
        export_consensus(tmp_path / "model", params, mesh=js.virtual_mesh({"replica": 2}))
