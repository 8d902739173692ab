"""Stages of a model that share a branch of the program."""

import jax
import numpy as np
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


ONE_F_ONE_B = js.schedules.one_f_one_b(4, 4)


@pytest.mark.parametrize(
    ("blocks", "schedule", "change", "kinds"),
    [
        # Equal blocks share one, and the ends have their own.
        (6, ONE_F_ONE_B, lambda layers: layers, [0, 1, 1, 2]),
        # Chunks of one device are told apart by where they begin.
        (6, js.schedules.interleaved(2, 4, 4), lambda layers: layers, [0, 1, 1, 1, 1, 1, 1, 2]),
        # Other numbers of layers, other functions, and those that cannot be compared.
        (4, ONE_F_ONE_B, lambda layers: layers, [0, 1, 2, 3]),
        (
            6,
            ONE_F_ONE_B,
            lambda layers: [*layers[:3], lambda p, x: layers[3](p, x), *layers[4:]],
            [0, 1, 2, 3],
        ),
        (6, ONE_F_ONE_B, lambda layers: list(map(Never, layers)), [0, 1, 2, 3]),
    ],
)
def test_equal_stages_share_a_branch_and_compute_their_own_layers(
    mesh_of, blocks, schedule, change, kinds
):
    model, params = language_model(blocks)
    model = js.LayeredModel(change(list(model.layers)), model.loss)
    parts = js.partition_uniform(blocks + 2, schedule.num_stages, schedule.num_chunks)
    mesh = mesh_of({"stage": schedule.num_stages})
    pipe = js.pipelined(model, params, schedule, parts=parts, mesh=mesh)
    assert list(pipe.plan.kind_index) == kinds
    values = jax.jit(pipe)(pipe.layout.stack(params), tokens(8))
    assert_close(values, model(params, tokens(8)))
    assert np.isfinite(values[0])
