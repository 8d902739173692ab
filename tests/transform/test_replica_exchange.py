"""Which part of a leaf a device holds, against jax's own placement of arrays."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.transform._replica_exchange import block_groups

AUTO, MANUAL = AxisType.Auto, AxisType.Manual
SIZES = {"a": 2, "b": 4}


def groups_of(shapes, specs, kinds=(AUTO, AUTO)):
    mesh = AbstractMesh(tuple(SIZES.values()), tuple(SIZES), kinds)
    leaves = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    with jax.sharding.use_abstract_mesh(mesh):
        return block_groups(leaves, specs)


# Over how many devices each dimension is split, and by which axes.
ENTRIES = [None, "a", "b", ("a", "b"), ("b", "a")]


@st.composite
def leaves(draw) -> tuple[tuple[int, ...], P]:
    """A shape, and specs that name no axis twice and may leave out the last dimensions."""
    entries, free = [], set(SIZES)
    for _ in range(draw(st.integers(0, 3))):
        entry = draw(st.sampled_from([e for e in ENTRIES if {*(e or ())} <= free]))
        free -= {*(entry or ())}
        entries.append(entry)
    parts = [int(np.prod([SIZES[name] for name in e or ()])) for e in entries]
    shape = [p * draw(st.integers(0, 3)) for p in parts]
    return (*shape, *draw(st.lists(st.integers(0, 3), max_size=2))), P(*entries)


@given(st.lists(leaves(), max_size=5))
def test_blocks_are_those_that_jax_places(found):
    """For all axes that are automatic, in the order of the group's axes."""
    shapes, specs = [shape for shape, _ in found], [spec for _, spec in found]
    groups = groups_of(shapes, specs)
    assert sorted(i for group in groups for i in group.indices) == list(range(len(shapes)))
    mesh = js.make_mesh(SIZES)
    for group in groups:
        sizes = tuple(group.axis_sizes.values())
        assert group.num_blocks == len(group.blocks()) == int(np.prod(sizes))
        for place, i in enumerate(group.indices):
            x = np.arange(np.prod(shapes[i])).reshape(shapes[i])
            held = NamedSharding(mesh, specs[i]).devices_indices_map(shapes[i])
            # Of the axes that are not in the group the leaf is whole: any device will do.
            devices = np.moveaxis(
                mesh.devices,
                [mesh.axis_names.index(name) for name in group.axis_sizes],
                range(len(sizes)),
            ).reshape(*sizes, -1)[..., 0]
            for device, block in zip(devices.flat, group.blocks(), strict=True):
                np.testing.assert_array_equal(x[block[place]], x[held[device]])
                assert x[block[place]].shape == group.block_shapes()[place]


def test_leaves_over_manual_axes_are_blocks_already():
    (group,) = groups_of([(8, 8), (4,)], [P("a", "b"), P()], (MANUAL, MANUAL))
    assert (group.axis_sizes, group.blocks()) == (
        {},
        [[(slice(0, 8), slice(0, 8)), (slice(0, 4),)]],
    )
    (group,) = groups_of([(8, 8)], [P("a", "b")], (MANUAL, AUTO))
    assert group.block_shapes() == [(8, 2)]


def test_specs_that_do_not_fit():
    for specs, said in (([P("c")], "axis 'c'"), ([P("a"), P("b")], "`param_specs`")):
        with pytest.raises(ValueError, match=said):
            groups_of([(8,)], specs)
