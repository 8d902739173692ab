"""Settings as texts, which processes compare: `test_two_processes.py` has what they say."""

import jax
import numpy as np
import optax

import jaxslowmo as js
from jaxslowmo.train.step._settings import described


def texts(value):
    return dict(described(value))


def test_a_text_tells_values_apart_and_equal_ones_not():
    def scaled(by):
        return lambda x: x * by

    def counted():
        table = {}
        table["itself"] = lambda x: table if x else counted
        return table["itself"]

    alike = [
        (counted(), counted()),
        (scaled(2.0), scaled(2.0)),
        ({"b": 1, "a": {"z", "y"}}, {"a": {"y", "z"}, "b": 1}),
        (np.arange(3), np.arange(3)),
        (js.every(4, start=2), js.every(4, start=2)),
        (js.codecs.float16(), js.codecs.float16()),
        (jax.sharding.PartitionSpec("a"), jax.sharding.PartitionSpec("a")),
    ]
    for one, other in alike:
        assert texts(one) == texts(other)
    values = [one for one, _ in alike]
    values += [scaled(3.0), {"a": 1}, np.arange(4), js.every(4, start=3), js.codecs.bfloat16()]
    values += [None, True, 1, 1.0, "1", (1,), [1], optax.sgd, np.float32]
    every = [str(texts(value)) for value in values]
    assert len(set(every)) == len(every)
    assert texts(object()) == {"": "builtins.object"}
