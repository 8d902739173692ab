"""Stages of a model that share a branch of the program."""

import jaxslowmo as js
from support.layered import language_model


def kinds(mesh_of, num_blocks, schedule, model=None):
    own, params = language_model(num_blocks)
    pipe = js.pipelined(
        model or own,
        params,
        schedule,
        parts=js.partition_uniform(num_blocks + 2, schedule.num_stages, schedule.num_chunks),
        mesh=mesh_of({"stage": schedule.num_stages}),
    )
    return list(pipe.plan.of_stage), pipe.plan


def test_equal_blocks_share_one_and_the_ends_have_their_own(mesh_of):
    of_stage, plan = kinds(mesh_of, 6, js.schedules.one_f_one_b(4, 4))
    assert of_stage == [0, 1, 1, 2]
    assert list(plan.shifts) == [0, 0, 2, 0]
    assert [kind.start for kind in plan.kinds] == [0, 2, 6]


def test_chunks_of_one_device_are_told_apart_by_where_they_begin(mesh_of):
    of_stage, plan = kinds(mesh_of, 6, js.schedules.interleaved(2, 4, 4))
    assert of_stage == [0, 1, 1, 1, 1, 1, 1, 2]
    block = 4 * 6 + 6 + 6 * 4  # elements; the first device holds the table in front of them
    starts = plan.kinds[1].weights.starts["float32"]
    assert plan.kinds[1].weights.segments[0].place.start == 0
    assert starts[1:7].tolist() == [0, 32, block, 32 + block, 2 * block, 32 + 2 * block]


def test_other_functions_and_other_numbers_of_layers_do_not_share(mesh_of):
    assert kinds(mesh_of, 4, js.schedules.one_f_one_b(4, 4))[0] == [0, 1, 2, 3]
    model, _ = language_model(6)
    other = list(model.layers)
    other[3] = lambda params, x: model.layers[3](params, x)
    changed = js.LayeredModel(other, model.loss)
    assert kinds(mesh_of, 6, js.schedules.one_f_one_b(4, 4), changed)[0] == [0, 1, 2, 3]


class Never:
    """Functions whose comparison fails, as that of arrays may."""

    def __call__(self, params, x):
        return x

    def __eq__(self, other):
        raise TypeError("no")

    def __hash__(self):
        return 0


def test_functions_that_cannot_be_compared_are_unequal(mesh_of):
    model, _ = language_model(6)
    own = js.LayeredModel(
        [model.layers[0], *[Never() for _ in range(6)], model.layers[7]], model.loss
    )
    assert kinds(mesh_of, 6, js.schedules.one_f_one_b(4, 4), own)[0] == [0, 1, 2, 3]
