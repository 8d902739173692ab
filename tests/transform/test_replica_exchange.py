"""Which of the axes in `param_specs` split leaves, and specs that do not fit."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxslowmo.transform import ReplicaGroup

AUTO, MANUAL = AxisType.Auto, AxisType.Manual
SIZES = {"replica": 2, "a": 2, "b": 4}


def blocks_of(shapes, specs, kinds=(AUTO, AUTO)):
    """The shapes of a device's blocks, inside of a map over the replicas."""
    mesh = AbstractMesh(tuple(SIZES.values()), tuple(SIZES), (MANUAL, *kinds))
    leaves = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    with jax.sharding.use_abstract_mesh(mesh):
        blocks = ReplicaGroup("replica", param_specs=specs).blocks(leaves)
    return [x.shape for x in blocks]


def test_leaves_over_manual_axes_are_blocks_already():
    specs = [P("a", "b"), P()]
    for kinds, shape in (((MANUAL, MANUAL), (8, 8)), ((MANUAL, AUTO), (8, 2))):
        assert blocks_of([(8, 8), (4,)], specs, kinds) == [shape, (4,)]


def test_leaves_over_other_axes_are_split():
    specs = [P("a", "b"), P(None, "a"), P(("b", "a"))]
    assert blocks_of([(8, 8, 3)] * 3, specs) == [(4, 2, 3), (8, 4, 3), (1, 8, 3)]
    assert blocks_of([(8, 8, 3)] * 3, P("a")) == [(4, 8, 3)] * 3  # one for all


def test_specs_that_do_not_fit():
    for specs, said in (([P("c")], "axis 'c'"), ([P("a"), P("b")], "`param_specs`")):
        with pytest.raises(ValueError, match=said):
            blocks_of([(8,)], specs)
