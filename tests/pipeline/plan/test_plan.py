"""Stages of a model that share a branch of the program."""

import jax
import pytest

import jaxslowmo as js
from support.layered import assert_close, language_model, tokens


class Never:
    """Functions whose comparison fails, as that of arrays may."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, params, x):
        return self.layer(params, x)

    def __eq__(self, other):
        raise TypeError("no")

    def __hash__(self):
        return 0


CHANGES = {
    "equal blocks share one, and the ends have their own": (lambda layers: layers, [0, 1, 1, 2]),
    "another function": (
        lambda layers: [*layers[:3], lambda p, x: layers[3](p, x), *layers[4:]],
        [0, 1, 2, 3],
    ),
    "functions that cannot be compared": (lambda layers: list(map(Never, layers)), [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_equal_stages_share_a_branch_and_compute_their_own_layers(mesh_of, name):
    change, kinds = CHANGES[name]
    model, params = language_model(6)
    model = js.LayeredModel(change(list(model.layers)), model.loss)
    schedule, parts = js.schedules.one_f_one_b(4, 4), js.partition_uniform(8, 4)
    pipe = js.pipelined(model, params, schedule, parts=parts, mesh=mesh_of({"stage": 4}))
    assert list(pipe.plan.kind_index) == kinds
    values = jax.jit(pipe)(pipe.layout.stack(params), tokens(8))
    assert_close(values, model(params, tokens(8)))
