"""Meshes, trees and shares that cannot be used are refused, by what is wrong with them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
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
    "no shares": shares([], []),
    "a function as shares": shares(lambda state: [], "function"),
    "a number as a pair": shares([1.0], "number 0"),
    "three for a pair": shares([(1.0, None), (1.0, None, None)], "number 1"),
    "weights of three replicas": shares([(np.ones(3), None)], "(3,)"),
    "parameters of other names": shares([(1.0, None), (1.0, {"v": PARAMS["w"]})], "number 1"),
    "parameters of other shapes": shares([(1.0, {"w": np.ones((2, 4))})], "number 0"),
    "arrays of no devices without a mesh": Refusal(lambda: js.consensus(PARAMS), "`mesh`", "w"),
    "a tolerance below 0": in_sync("`tolerance`", -1.0, tolerance=-1.0),
    "a tolerance without end": in_sync("`tolerance`", np.inf, tolerance=np.inf),
    "NaN as a tolerance": in_sync("`tolerance`", np.nan, tolerance=np.nan),
    "a text as a tolerance": in_sync("`tolerance`", "'0'", tolerance="0"),
    "leaves of three replicas": in_sync("2 replicas", "w (3,)", {"w": jnp.ones(3)}),
    "leaves without replicas": in_sync("2 replicas", "s ()", {**PARAMS, "s": jnp.ones([])}),
    "an axis of no mesh": in_sync("`axis_name` 'node'", "'replica'", axis_name="node"),
    "sharded over the replicas": Refusal(over_replicas, "'replica'", "w", UserWarning),
    "a function as a leaf": Refusal(
        lambda: js.replicate({"w": np.ones(2), "f": jnp.sin}, mesh=MESH), "replicate", "f ("
    ),
    "no axes": Refusal(lambda: js.virtual_mesh({}), "`axes`"),
    "a size alone": Refusal(lambda: js.virtual_mesh(4), "`axes`", 4),
    "axes without sizes": Refusal(lambda: js.make_mesh(["replica"]), "`axes`", "['replica']"),
    "no mesh": Refusal(lambda: js.replicate(PARAMS, mesh=None), "`mesh`", None),
    "an axis of no size": Refusal(lambda: js.make_mesh({"replica": 0}), "'replica'", 0),
    "too few devices": Refusal(lambda: js.make_mesh({"replica": 9}), "`axes`", "found 8"),
    "devices that do not divide the replicas": Refusal(
        lambda: js.make_mesh({"replica": 4, "device": 2}, devices=jax.devices()[:3]),
        "`axes`",
        "found 3",
    ),
    "virtual replicas on too many devices": Refusal(
        lambda: js.virtual_mesh({"replica": 4}, jax.devices()), "`devices`", 8
    ),
    "virtual replicas on no device": Refusal(
        lambda: js.virtual_mesh({"replica": 4}, []), "`devices`", 0
    ),
    "a device twice": Refusal(
        lambda: js.virtual_mesh({"replica": 4}, jax.devices()[:1] * 2), "`devices`", "distinct"
    ),
    "a device of another process": Refusal(
        lambda: js.make_mesh({"replica": 4}, devices=[jax.devices()[0], OfOther()]),
        "`devices`",
        "[0, 1]",
    ),
    "slices of other sizes": of_slices({"a": 3}, "1 of slice 1", 0, 0, 1),
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
