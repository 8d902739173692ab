"""The anchor as a tree, wherever it lives."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

PARAMS = {"w": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)}
MESH = js.virtual_mesh({"replica": 2})


@pytest.mark.parametrize("options", [{}, {"shard_state": False}, {"exact_average": False}])
def test_it_starts_as_the_parameters(options):
    """With a base's average each replica has its own."""
    base = js.local_sgd("replica", sync_every=2)
    sync = js.slowmo("replica", base=base, sync_every=4, **options)
    stacked = {"w": np.stack([PARAMS["w"], PARAMS["w"] + ("exact_average" in options)])}
    state = js.init(sync, stacked, mesh=MESH)
    found = js.read_anchor(sync, state, stacked, mesh=MESH)["w"]
    np.testing.assert_array_equal(found, stacked["w"])
    assert found.dtype == np.float32


def test_anchor_of_parameters_sharded_inside_a_replica_is_read():
    mesh = js.make_mesh({"replica": 2, "fsdp": 4})
    placed = {"w": jax.device_put(PARAMS["w"], NamedSharding(mesh, P("fsdp")))}
    stacked = js.replicate(placed, mesh=mesh, axis_name="replica")
    tx = js.diloco("replica", param_specs={"w": P("fsdp")})
    state = js.init(tx, stacked, mesh=mesh, axis_name="replica")
    anchor = js.read_anchor(tx, state, stacked, mesh=mesh)
    assert np.array_equal(anchor["w"], np.stack([PARAMS["w"]] * 2))


def test_others_have_none():
    sync = js.local_sgd("replica")
    stacked = js.replicate(PARAMS, mesh=MESH)
    with pytest.raises(ValueError, match=r"`sync` must be made by js.slowmo or js.diloco"):
        js.read_anchor(sync, js.init(sync, stacked, mesh=MESH), stacked, mesh=MESH)
