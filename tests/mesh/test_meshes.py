"""Meshes of devices and of virtual replicas."""

import jax
import pytest
from jax.sharding import AxisType

import jaxslowmo as js


def test_real_mesh():
    mesh = js.make_mesh({"replica": 2, "device": 3})
    assert dict(mesh.shape) == {"replica": 2, "device": 3}
    assert mesh.axis_names == ("replica", "device")
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert len({d.id for d in mesh.devices.flat}) == 6


def test_given_devices_are_used():
    chosen = jax.devices()[4:8]
    mesh = js.make_mesh({"replica": 4}, devices=chosen)
    assert set(mesh.devices.flat) == set(chosen)


def test_virtual_mesh_is_a_value():
    mesh = js.virtual_mesh({"replica": 4, "device": 2})
    assert dict(mesh.shape) == {"replica": 4, "device": 2}
    assert mesh.axis_names == ("replica", "device")
    assert mesh == js.virtual_mesh({"replica": 4, "device": 2})
    assert mesh != js.virtual_mesh({"device": 2, "replica": 4})
    assert len({mesh, js.virtual_mesh({"replica": 4, "device": 2})}) == 1
    with pytest.raises(TypeError):
        mesh.shape["replica"] = 3
