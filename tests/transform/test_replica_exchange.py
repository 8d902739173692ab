"""Which of the axes in `param_specs` split leaves, and specs that do not fit."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxslowmo.transform import ReplicaGroup, packing_of

AUTO, MANUAL = AxisType.Auto, AxisType.Manual
SIZES = {"a": 2, "b": 4}


def groups_of(shapes, specs, kinds=(AUTO, AUTO)):
    mesh = AbstractMesh(tuple(SIZES.values()), tuple(SIZES), kinds)
    leaves = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    with jax.sharding.use_abstract_mesh(mesh):
        packing = packing_of(leaves, ReplicaGroup("replica", param_specs=specs))
    return packing.groups


def test_leaves_over_manual_axes_are_blocks_already():
    (group,) = groups_of([(8, 8), (4,)], [P("a", "b"), P()], (MANUAL, MANUAL))
    assert (group.axis_sizes, group.plan.shapes) == ({}, ((8, 8), (4,)))
    (group,) = groups_of([(8, 8)], [P("a", "b")], (MANUAL, AUTO))
    assert (group.axis_sizes, group.plan.shapes) == ({"b": 4}, ((8, 2),))


def test_leaves_over_the_same_axes_are_packed_together():
    specs = [P("a", "b"), P(None, "a"), P(("b", "a"))]
    groups = groups_of([(8, 8)] * 3, specs)
    assert [(group.axis_sizes, group.indices) for group in groups] == [
        ({"a": 2, "b": 4}, (0, 2)),
        ({"a": 2}, (1,)),
    ]


def test_specs_that_do_not_fit():
    for specs, said in (([P("c")], "axis 'c'"), ([P("a"), P("b")], "`param_specs`")):
        with pytest.raises(ValueError, match=said):
            groups_of([(8,)], specs)
