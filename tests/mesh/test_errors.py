"""Meshes, trees and shares that cannot be used are refused, by what is wrong with them."""

from types import SimpleNamespace

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.refusals import Refusal, each

MESH = js.virtual_mesh({"replica": 2})
MEAN = js.all_reduce_gradients("node")
PARAMS = {"w": np.ones((2, 3), np.float32)}


def shares(pairs, value):
    return Refusal(lambda: js.consensus(PARAMS, mesh=MESH, shares=pairs), "`shares`", value)


def in_sync(argument, value, tree=PARAMS, **options):
    return Refusal(lambda: js.check_in_sync(tree, mesh=MESH, **options), argument, value)


def of_slices(axes, value, *slices):
    devices = [SimpleNamespace(slice_index=i, platform="tpu") for i in slices]
    return Refusal(lambda: js.make_mesh(axes, devices), "`axes`", value)


class OfOther:
    """A device of process 1."""

    process_index, platform = 1, "cpu"


def over_replicas():
    """Replicate parameters of which one is sharded over the axis of the replicas."""
    mesh = js.make_mesh({"replica": 2})
    split = jax.device_put(PARAMS["w"], NamedSharding(mesh, P("replica")))
    return js.replicate({"w": split, "b": np.ones(3)}, mesh=mesh)


ROWS = {
    "weights of three replicas": shares([(np.ones(3), None)], "(3,)"),
    "arrays of no devices without a mesh": Refusal(lambda: js.consensus(PARAMS), "`mesh`", "w"),
    "an axis of no mesh": in_sync("`axis_name` 'node'", "'replica'", axis_name="node"),
    "sharded over the replicas": Refusal(over_replicas, "'replica'", "w", UserWarning),
    "too few devices": Refusal(lambda: js.make_mesh({"replica": 9}), "`axes`", "found 8"),
    "a device of another process": Refusal(
        lambda: js.make_mesh({"replica": 4}, devices=[jax.devices()[0], OfOther()]),
        "`devices`",
        "[0, 1]",
    ),
    "an axis that splits a slice": of_slices({"a": 3, "b": 2}, "'a'", 0, 0, 0, 1, 1, 1),
    "an axis that is not mapped": Refusal(
        lambda: jax.vmap(lambda g: MEAN.update(g, MEAN.init(g)), axis_name="replica")(PARAMS),
        "'node'",
        "'replica'",
    ),
}


@each(ROWS)
def test_refused(refusal):
    refusal.check()
