"""`js.make_mesh` over several TPU slices: outer axes run over the network between them."""

import numpy as np
from jax.experimental import topologies

import jaxslowmo as js

SLICES, CHIPS = 4, 16


def test_every_slice_lies_alike():
    """Chips of one place in their slices, so that exchanges between slices pair them."""
    found = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:4x4", num_slices=SLICES
    ).devices
    devices = [found[i] for i in np.random.default_rng(0).permutation(len(found))]
    for axes in ({"replica": 2, "device": 32}, {"pod": 2, "replica": 2, "device": 16}):
        mesh = js.make_mesh(axes, devices=devices)
        slices = [device.slice_index for device in mesh.devices.flat]
        assert slices == [i for i in range(SLICES) for _ in range(CHIPS)]
    places = [[tuple(d.coords) for d in row] for row in mesh.devices.reshape(SLICES, CHIPS)]
    assert places == [places[0]] * SLICES
    # Neighbours along the axis are neighbours in the torus or grid, not in the order of numbers.
    steps = np.abs(np.diff(np.array(places[0]), axis=0)).sum(axis=1)
    assert steps.max() == 1
    # Of more than are needed the first slices are taken.
    mesh = js.make_mesh({"replica": 2, "device": 16}, devices=devices)
    assert [d.slice_index for d in mesh.devices.flat] == [0] * CHIPS + [1] * CHIPS
