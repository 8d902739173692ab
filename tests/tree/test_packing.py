"""Packing of sharded leaves: which blocks devices hold, and parts of buffers on the host."""

import math

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.tree import TreePacking, plan_buffers
from jaxslowmo.tree._packing import from_blocks, to_blocks

SIZES = {"a": 2, "b": 4}

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


def packed(found, limits=None) -> tuple[list[np.ndarray], TreePacking]:
    """Leaves of these shapes with numbers of their own, and their packing."""
    rng = np.random.default_rng(0)
    kinds = [np.float16, np.float32]
    tree = [rng.integers(1, 999, shape).astype(kinds[i % 2]) for i, (shape, _) in enumerate(found)]
    packing = TreePacking.planned(
        jax.tree.structure(tree),
        tree,
        [spec for _, spec in found],
        SIZES,
        lambda blocks, place: plan_buffers(blocks, limits=limits, split_large=True),
    )
    return tree, packing


@given(st.lists(leaves(), max_size=5))
def test_blocks_are_those_that_jax_places(found):
    """For all axes that are automatic, in the order of the group's axes."""
    tree, packing = packed(found)
    groups = packing.groups
    assert sorted(i for group in groups for i in group.indices) == list(range(len(found)))
    mesh = js.make_mesh(SIZES)
    for group in groups:
        sizes = tuple(group.axis_sizes.values())
        for i, spec, shape in zip(group.indices, group.specs, group.plan.shapes, strict=True):
            blocks = to_blocks(tree[i], spec, group.axis_sizes)
            assert blocks.shape == (*sizes, math.prod(shape))
            whole = from_blocks(blocks, tree[i].shape, spec, group.axis_sizes)
            np.testing.assert_array_equal(whole, tree[i])
            held = NamedSharding(mesh, spec).devices_indices_map(tree[i].shape)
            # Of the axes that are not in the group the leaf is whole: any device will do.
            devices = np.moveaxis(
                mesh.devices,
                [mesh.axis_names.index(name) for name in group.axis_sizes],
                range(len(sizes)),
            ).reshape(*sizes, -1)[..., 0]
            of_devices = blocks.reshape(group.num_blocks, *shape)
            for device, block in zip(devices.flat, of_devices, strict=True):
                np.testing.assert_array_equal(block, tree[i][held[device]])


@given(leaves(), st.integers(0, 2))
def test_blocks_have_the_dimensions_before_those_of_the_leaf(found, num_lead):
    shape, spec = found
    sizes = {name: SIZES[name] for entry in spec for name in entry or ()}
    lead = (2, 3)[:num_lead]
    x = np.arange(math.prod((*lead, *shape))).reshape((*lead, *shape))
    blocks = to_blocks(x, spec, sizes, num_lead)
    for index in np.ndindex(*lead):
        np.testing.assert_array_equal(blocks[index], to_blocks(x[index], spec, sizes))
    np.testing.assert_array_equal(from_blocks(blocks, shape, spec, sizes), x)
