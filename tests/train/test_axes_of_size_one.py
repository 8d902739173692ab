"""An axis of size 1 is as if it were not there, whatever names it."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from train.libraries import BATCHES, PARAMS, loss_fn

# Over "one" alone, beside an axis that splits, and together with it.
SPECS = {"bias": P("one"), "in": P("one", "fsdp"), "out": P(("fsdp", "one"))}
ALONE = {"bias": P("one"), "in": P(None, "one"), "out": P()}


def without(specs, axis):
    kept = lambda e: tuple(n for n in (e if isinstance(e, tuple) else (e,)) if n != axis)  # noqa: E731
    return {name: P(*((kept(e) or (None,))[0] for e in spec)) for name, spec in specs.items()}


SYNCS = {
    "local_sgd": js.local_sgd("replica", sync_every=2),
    "slowmo": js.slowmo("replica", base=js.local_sgd("replica", sync_every=1), sync_every=2),
    "fragments": js.diloco("replica", sync_every=2, fragments=2),
}


def trained(sync, axes, places, gradients, mode):
    """The mean after three steps, and the axes over which the step communicates."""
    mesh = js.make_mesh(axes)
    laid = {name: NamedSharding(mesh, places[name]) for name in PARAMS}
    params = jax.device_put(PARAMS, laid)
    reduced = js.all_reduce_gradients(gradients) if gradients else None
    step = js.make_train_step(
        loss_fn, optax.adam(0.1), sync=SYNCS[sync], gradients=reduced, mesh=mesh, mode=mode
    )
    state = step.init(params)
    rows = js.comm_report(step, state, BATCHES[0]).rows
    for batch in BATCHES[:3]:
        state, _ = step(state, batch)
    return jax.tree.map(np.asarray, step.consensus(state)), {row.axis for row in rows}


CASES = [
    ("slowmo", True, False, "host"),
    ("local_sgd", True, True, "traced"),
    ("fragments", False, True, "traced"),
]


@pytest.mark.parametrize(("sync", "is_split", "is_averaged", "mode"), CASES)
def test_a_step_trains_as_without_it(sync, is_split, is_averaged, mode):
    """Named in the layout of the parameters, and in the average of gradients."""
    specs, inner = (SPECS, {"fsdp": 2}) if is_split else (ALONE, {})
    ends = []
    for one in ({}, {"one": 1}):
        averaged = ("replica", *one) if is_averaged else None
        places = specs if one else without(specs, "one")
        ends.append(trained(sync, {"replica": 2, **inner, **one}, places, averaged, mode))
    (wanted, over), (found, also_over) = ends
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert not any("one" in str(axis) for axis in also_over), also_over
    assert len(over) == len(also_over)
