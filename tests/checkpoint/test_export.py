"""The consensus model on disk."""

import collections
import json
import tempfile

import hypothesis.strategies as st
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import example, given

import jaxslowmo as js
from checkpoint.runs import leaf_bytes
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
    assert list(value) == ["jaxslowmo_consensus", "leaves", "prints", "extra"]
    assert value["leaves"][0] == ["layers/0/w", [6], "float32"]
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


Pair = collections.namedtuple("Pair", "second first")
LEAVES = [
    np.arange(2.0, dtype=np.float32),
    *(np.arange(6.0).reshape(2, 3).astype(d) for d in ("bfloat16", "int4", "complex64", "bool")),
    jax.random.split(jax.random.key(7), (2, 3)),
    jax.random.split(jax.random.key(7, impl="rbg"), 2),
]
NAMES = ["a", "b", "a.b", "a/b", "a/", "", "/", ".", "0", "params", "(root)", "\u00e4 %"]


def above(trees):
    pairs = st.builds(Pair, trees, trees)
    named = st.dictionaries(st.sampled_from(NAMES), trees, max_size=3)
    return pairs | named | st.lists(trees, max_size=2) | st.tuples(trees)


def as_nested(tree):
    """A tree as dicts and lists with names that are texts."""
    if isinstance(tree, Pair):
        tree = tree._asdict()
    if isinstance(tree, dict):
        return {str(name): as_nested(x) for name, x in tree.items()}
    return [as_nested(x) for x in tree] if isinstance(tree, list | tuple) else tree


@given(st.recursive(st.sampled_from(LEAVES), above, max_leaves=6))
@example(LEAVES[0])
@example({"a/b": LEAVES[1], "a": {"b": LEAVES[2]}})
@example({"a.b": LEAVES[1], "a": {"b": LEAVES[2]}})
@example({"": {"": LEAVES[0]}, "/": LEAVES[5]})
@example({})
def test_every_tree_comes_back_or_is_refused_by_two_leaves_that_share_a_place(params):
    mean = js.consensus(params, mesh=MESH)
    paths = [path for path, _ in jax.tree.leaves_with_path(mean)]
    # Orbax joins names by dots, and zarr ends the result with a slash.
    names = [".".join(jax.tree_util.keystr((k,), simple=True) for k in path) for path in paths]
    places = [name if name.endswith("/") else f"{name}/" for name in names]
    shared = [
        jax.tree_util.keystr(p) for p, x in zip(paths, places, strict=True) if places.count(x) > 1
    ]
    with tempfile.TemporaryDirectory() as folder:
        if shared or not paths:
            with pytest.raises(ValueError, match="`params`") as caught:
                export_consensus(f"{folder}/model", params, mesh=MESH)
            assert sum(path in str(caught.value) for path in shared) >= min(2, len(shared))
            return
        export_consensus(f"{folder}/model", params, mesh=MESH)
        back = load_consensus(f"{folder}/model", like=mean)
        nested = load_consensus(f"{folder}/model")
    for loaded, expected in ((back, mean), (nested, as_nested(mean))):
        assert jax.tree.structure(loaded) == jax.tree.structure(expected)
        assert leaf_bytes(loaded) == leaf_bytes(expected)
        assert [x.dtype for x in jax.tree.leaves(loaded)] == [
            x.dtype for x in jax.tree.leaves(expected)
        ]
