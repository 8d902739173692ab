"""What `js.embeddings` and `js.Table` refuse."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js

TABLE = js.Table(8, 4)


def make(tables, **options):
    options = {"axis_name": "shard", "optimizer": js.rowwise_sgd(0.1), **options}
    return js.embeddings(tables, **options)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, r"`tables` must map names to js.Table, and not be empty"),
        ([TABLE], r"`tables` must map names"),
        ({"a": 3}, r"must map names to js.Table, got 'a': 3"),
        ({"a": js.Table(0, 4)}, r"'a': `num_rows` must be an int >= 1, got 0"),
        ({"a": js.Table(2**31, 4)}, r"'a': `num_rows` can be at most"),
        ({"a": js.Table(8, True)}, r"'a': `dim` must be an int >= 1, got True"),
        ({"a": js.Table(8, 4, shard="rows")}, r"'a': `shard` must be .* got 'rows'"),
        ({"a": js.Table(8, 4, pooling="max")}, r"'a': `pooling` must be .* got 'max'"),
        ({"a": js.Table(8, 4, dtype=jnp.int8)}, r"'a': `dtype` must be a floating type"),
        ({"a": js.Table(8, 4, dtype="float33")}, r"'a': `dtype` must be .* got 'float33'"),
        ({"a": js.Table(8, 4, dtype=float)}, r"'a': `dtype` must be .* with jax_enable_x64"),
        ({"a": js.Table(8, 4, init=0.5)}, r"'a': `init` must be a function"),
        ({"a": js.Table(8, 4, features="b")}, r"'a': `features` must be a sequence of names"),
        ({"a": js.Table(8, 4, features=())}, r"'a': `features` must be a sequence of names"),
        ({"a": js.Table(8, 4, position_weights={"b": "p"})}, r"must map features of the table"),
        ({"a": js.Table(8, 4, position_weights=3)}, r"`position_weights` must be the name"),
        (
            {"a": TABLE, "b": js.Table(8, 4, features=("a",))},
            r"feature 'a' looks up table 'a' and 'b'",
        ),
    ],
)
def test_bad_tables(tables, message):
    with pytest.raises(ValueError, match=f"embeddings: .*{message}"):
        make(tables)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis_name": ("a", "b")}, r"`axis_name` must be one name or None"),
        ({"optimizer": 0.1}, r"`optimizer` must be js.rowwise_adagrad"),
        ({"inputs": "a"}, r"`inputs` must be a function of the batch, got 'a'"),
        ({"overflow": "wrap"}, r'`overflow` must be "error" or "drop", got \'wrap\''),
        ({"capacity": 0}, r"`capacity` of table 'a' must be .* got 0"),
        ({"capacity": {"b": 1}}, r"`capacity` names 'b', but the tables are 'a'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=f"embeddings: {message}"):
        make({"a": TABLE}, **options)


def test_the_axis_must_be_there():
    emb = make({"a": TABLE})
    with pytest.raises(
        ValueError, match=r"'shard' is not an axis of the mesh, which has 'replica'"
    ):
        emb.over(js.make_mesh({"replica": 2}))
    with pytest.raises(ValueError, match=r"embeddings.exchange_ids: `axis_name` 'shard' is not a"):
        emb.exchange_ids({"a": np.zeros(2, int)})


def test_write_wants_every_table_in_its_shape():
    emb = make({"a": TABLE, "b": TABLE})
    with pytest.raises(
        ValueError, match=r"`write` needs tables of the shapes .*\(8, 4\).*\(8, 3\)"
    ):
        emb.write({"a": np.zeros((8, 4)), "b": np.zeros((8, 3))})


def test_several_features_share_a_table():
    emb = make({"a": js.Table(8, 4, features=["x", "y"]), "b": TABLE})
    assert emb.features == {"x": "a", "y": "a", "b": "b"}
