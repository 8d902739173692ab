"""The consensus model on disk."""

import collections
import errno
import json
import tempfile

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import example, given
from safetensors.numpy import load_file

import jaxslowmo as js
from checkpoint.runs import leaf_bytes
from jaxslowmo.checkpoint import (
    CheckpointError,
    consensus_extra,
    export_consensus,
    load_consensus,
)
from jaxslowmo.tree import leaf_names

W, SCALE = np.arange(12.0, dtype=np.float32).reshape(2, 6), jax.numpy.bfloat16([[1, 2], [3, 5]])
PARAMS = {"layers": [{"w": W}], "scale": SCALE}
MEAN = {"layers": [{"w": W[0] + np.float32(3)}], "scale": jax.numpy.bfloat16([2, 3.5])}
MESH = js.virtual_mesh({"replica": 2})


NAMED = {"layers/0/w": MEAN["layers"][0]["w"], "scale": MEAN["scale"]}


def same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert [x.dtype for x in jax.tree.leaves(a)] == [x.dtype for x in jax.tree.leaves(b)]


def test_it_comes_back_and_others_can_read_it_and_damage_is_noticed(tmp_path):
    path = tmp_path / "model"
    for name in ("model.7.orbax-checkpoint-tmp", "other.7.orbax-checkpoint-tmp"):
        (tmp_path / name / "state").mkdir(parents=True)  # as interrupted exports leave it
    export_consensus(path, jax.tree.map(lambda x: x * 0, PARAMS), mesh=MESH)
    export_consensus(path, PARAMS, mesh=MESH, extra={"step": 7})  # replaces it
    assert {x.name for x in tmp_path.iterdir()} == {"model", "other.7.orbax-checkpoint-tmp"}
    assert consensus_extra(path) == {"step": 7}
    same(load_consensus(path), NAMED)
    same(load_consensus(path, like=MEAN), MEAN)
    same(load_file(path / "model.safetensors"), NAMED)

    record = path / "jaxslowmo.json"
    value = json.loads(record.read_text())
    record.write_text(json.dumps(value | {"jaxslowmo_consensus": 1}))
    with pytest.raises(CheckpointError, match="format 1"):
        load_consensus(path)
    record.write_text(json.dumps(value))
    file = path / "model.safetensors"
    data = file.read_bytes()
    for damaged in (data[:-20], data[:-1] + bytes([data[-1] ^ 16])):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            load_consensus(path)


def test_one_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    export_consensus(tmp_path / "model", PARAMS, mesh=MESH, extra={"step": 7})

    def fail(*_):
        raise OSError(errno.ENOSPC, "as the test says")

    monkeypatch.setattr(safetensors.numpy, "save", fail)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        export_consensus(tmp_path / "model", PARAMS, mesh=MESH)
    assert caught.value.errno == errno.ENOSPC
    assert [x.name for x in tmp_path.iterdir()] == ["model"]
    assert consensus_extra(tmp_path / "model") == {"step": 7}


Pair = collections.namedtuple("Pair", "second first")
DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "complex64", "bool", "int8", "uint32")
LEAVES = [
    np.arange(2.0, dtype=np.float32),
    np.zeros((2, 0, 3), np.float32),
    *(np.arange(6.0).reshape(2, 3).astype(dtype) for dtype in DTYPES),
]
NAMES = ["a", "b", "a.b", "a/b", "a/", "", "/", ".", "0", "params", "(root)", "\u00e4 %"]


def above(trees):
    pairs = st.builds(Pair, trees, trees)
    named = st.dictionaries(st.sampled_from(NAMES), trees, max_size=3)
    return pairs | named | st.lists(trees, max_size=2) | st.tuples(trees)


@given(st.recursive(st.sampled_from(LEAVES), above, max_leaves=6))
@example(LEAVES[0])
@example({"a/b": LEAVES[1], "a": {"b": LEAVES[2]}})
@example({})
def test_every_tree_comes_back_or_is_refused_by_the_names_that_leaves_share(params):
    mean = js.consensus(params, mesh=MESH)
    names = leaf_names(mean)
    shared = [name for name in names if names.count(name) > 1]
    with tempfile.TemporaryDirectory() as folder:
        if shared:
            with pytest.raises(ValueError, match="`params`") as caught:
                export_consensus(f"{folder}/model", params, mesh=MESH)
            assert all(name in str(caught.value) for name in shared)
            return
        export_consensus(f"{folder}/model", params, mesh=MESH)
        back = load_consensus(f"{folder}/model", like=mean)
        by_name = load_consensus(f"{folder}/model")
    assert jax.tree.structure(back) == jax.tree.structure(mean)
    assert list(by_name) == names
    for leaves in (jax.tree.leaves(back), list(by_name.values())):
        assert leaf_bytes(leaves) == leaf_bytes(mean)
        assert [x.dtype for x in leaves] == [x.dtype for x in jax.tree.leaves(mean)]


def test_shares_weigh_the_replicas(tmp_path):
    shares = [(np.array([3, 1], np.float32), None), (np.array([0, 4], np.float32), PARAMS)]
    export_consensus(tmp_path / "model", PARAMS, mesh=MESH, shares=shares)
    weights = np.array([3, 5]) / 8
    found = load_consensus(tmp_path / "model")
    np.testing.assert_array_equal(found["layers/0/w"], np.float32(weights @ W))
    np.testing.assert_array_equal(found["scale"], jax.numpy.bfloat16([2.25, 3.875]))
