"""What `js.embeddings`, its tables, bags and optimizers refuse."""

import jax.numpy as jnp
import numpy as np

import jaxslowmo as js
from jaxslowmo.embedding._bags import bags_of
from support.refusals import Refusal, each
from support.wrong import wrong

TABLES, SGD = {"a": js.Table(8, 4)}, js.rowwise_sgd(0.1)


def made(tables=TABLES, axis_name="shard", optimizer=SGD, **options):
    return js.embeddings(tables, axis_name=axis_name, optimizer=optimizer, **options)


def table(num_rows=8, dim=4, **options):
    return made({"a": js.Table(num_rows, dim, **options)})


def of_feature(ids, weights=None):
    given = ids if weights is None else js.embedding.Bags(ids, weights)
    return bags_of({"a": given}, ("a",), None)


def bags(rows=(1, 2), **options):
    return js.embedding.bags(rows, **options)


MAKING = {
    **wrong(table, num_rows=0, shard="rows", pooling="max", dtype=jnp.int8, optimizer=0.1),
    **wrong(table, position_weights={"b": "p"}),
    **wrong(made, tables={}, optimizer=0.1, overflow="wrap"),
    **wrong(js.rowwise_adagrad, learning_rate=-0.1),
    "a feature of two tables": Refusal(
        lambda: made({**TABLES, "b": js.Table(8, 4, features=("a",))}), "'a'", "'b'"
    ),
    "no optimizer": Refusal(
        lambda: made({"b": js.Table(8, 4, optimizer=SGD), **TABLES}, optimizer=None), "'a'"
    ),
}
DEVICES = {
    "columns that are not shared evenly": Refusal(
        lambda: table(9, 6, shard="column").over(4), "'a'", "(4)"
    ),
    "no such axis": Refusal(
        lambda: made().over(js.make_mesh({"replica": 2})), "`axis_name` 'shard'", "'replica'"
    ),
}
BAGS = {
    "a negative length": Refusal(lambda: bags(lengths=[3, -1]), "`lengths`", "-1 for bag 1"),
    "too long": Refusal(lambda: bags([[0], [1, 2, 3]], max_length=2), "bag 1 has 3 ids", 2),
    "negative ids": Refusal(lambda: bags([[0, -1]]), "ids", -1),
    "features that do not divide": Refusal(
        lambda: js.embedding.jagged([1, 2, 3], features=("a", "b"), lengths=[1, 1, 1]),
        "`features`",
        "3 bags",
    ),
    "ids of floats": Refusal(lambda: of_feature(np.zeros(1)), "'a'", "float64[1]"),
    "fewer weights": Refusal(
        lambda: of_feature(np.arange(2), np.ones(3)), "weights of", "float64[3]"
    ),
}


@each(MAKING | DEVICES | BAGS)
def test_refused(refusal):
    refusal.check()
