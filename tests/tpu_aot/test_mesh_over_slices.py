"""`js.make_mesh` over several TPU slices: outer axes run over the network between them."""

import numpy as np
import pytest
from jax.experimental import topologies

import jaxslowmo as js

SLICES, CHIPS = 4, 16


@pytest.fixture(scope="module")
def devices():
    found = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:4x4", num_slices=SLICES
    ).devices
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def slices(mesh) -> list[int]:
    return [device.slice_index for device in mesh.devices.flat]


def test_outer_axes_run_over_slices(devices):
    for axes in (
        {"replica": 2, "device": 32},
        {"pod": 2, "replica": 2, "device": 16},
    ):
        mesh = js.make_mesh(axes, devices=devices)
        assert dict(mesh.shape) == axes
        assert len({device.id for device in mesh.devices.flat}) == SLICES * CHIPS
        assert slices(mesh) == [i for i in range(SLICES) for _ in range(CHIPS)]
    half = [device for device in devices if device.coords[0] < 2]
    mesh = js.make_mesh({"replica": 8, "device": 4}, devices=half)
    assert slices(mesh) == [i for i in range(SLICES) for _ in range(CHIPS // 2)]
    # Of more than are needed the first slices are taken.
    mesh = js.make_mesh({"replica": 2, "device": 16}, devices=devices)
    assert slices(mesh) == [0] * CHIPS + [1] * CHIPS


def test_every_slice_lies_alike(devices):
    """Chips of one place in their slices, so that exchanges between slices pair them."""
    mesh = js.make_mesh({"replica": 4, "device": 16}, devices=devices)
    places = [[tuple(device.coords) for device in row] for row in mesh.devices]
    assert places == [places[0]] * SLICES
    # Neighbours along the axis are neighbours in the torus or grid, not in the order of numbers.
    steps = np.abs(np.diff(np.array(places[0]), axis=0)).sum(axis=1)
    assert steps.max() == 1
