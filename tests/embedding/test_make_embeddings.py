"""What `js.embeddings` makes of its arguments."""

import numpy as np

import jaxslowmo as js

TABLE = js.Table(np.int64(8), np.int8(4))


def test_several_features_share_a_table():
    tables = {"a": js.Table(8, 4, features=["x", "y"]), "b": TABLE}
    emb = js.embeddings(tables, axis_name=None, optimizer=js.rowwise_sgd(0.1))
    assert emb.features == {"x": "a", "y": "a", "b": "b"}
    assert (type(emb.tables["b"].num_rows), emb.tables["b"].dim) == (int, 4)


def test_a_capacity_is_of_all_tables_or_of_those_that_are_named():
    def capacity(given):
        options = {"axis_name": None, "optimizer": js.rowwise_sgd(0.1)}
        return js.embeddings({"a": TABLE, "b": TABLE}, capacity=given, **options).capacity

    assert capacity("auto") == {"a": None, "b": None}
    assert capacity(3) == {"a": 3, "b": 3}
    assert capacity({"b": 1}) == {"a": None, "b": 1}
