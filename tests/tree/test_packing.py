"""Packing of sharded leaves: which blocks devices hold, and parts of buffers on the host."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.tree._staged import from_blocks, to_blocks

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


@given(leaves())
def test_blocks_are_those_that_jax_places(found):
    shape, spec = found
    split = {name for entry in spec for name in entry or ()}
    axes = {name: size for name, size in SIZES.items() if name in split}
    x = np.arange(math.prod(shape)).reshape(shape)
    blocks = to_blocks(x, spec, axes)
    np.testing.assert_array_equal(from_blocks(blocks, shape, spec, axes), x)
    mesh = js.make_mesh(SIZES)
    held = NamedSharding(mesh, spec).devices_indices_map(shape)
    # Over the other axes the leaf is whole: any device will do.
    order = [mesh.axis_names.index(name) for name in axes]
    devices = np.moveaxis(mesh.devices, order, range(len(order)))
    devices = devices.reshape(*axes.values(), -1)[..., 0]
    for device, block in zip(devices.flat, blocks.reshape(devices.size, -1), strict=True):
        np.testing.assert_array_equal(block, x[held[device]].reshape(-1))


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
