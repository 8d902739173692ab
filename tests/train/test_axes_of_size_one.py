"""An axis of size 1 is as if it were not there, whatever names it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

RANDOM = np.random.default_rng(0)
PARAMS = {
    "w": RANDOM.normal(size=(6, 4)).astype(np.float32),
    "table": RANDOM.normal(size=(2, 4)).astype(np.float32),
}
BATCHES = RANDOM.normal(size=(3, 16, 6)).astype(np.float32)
# Over "one" alone, beside an axis that splits, and together with it.
SPECS = {"w": P("one", "fsdp"), "table": P(None, ("fsdp", "one"))}
ALONE = {"w": P("one"), "table": P(None, "one")}


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"]) + params["table"].sum(0, keepdims=True)) ** 2)


def without(specs, axis):
    kept = lambda e: tuple(n for n in (e if isinstance(e, tuple) else (e,)) if n != axis)  # noqa: E731
    return {name: P(*((kept(e) or (None,))[0] for e in spec)) for name, spec in specs.items()}


SYNCS = {
    "local_sgd": js.local_sgd("replica", sync_every=2),
    "sgp": js.sgp("replica", overlap=1),
    "slowmo": js.slowmo("replica", base=js.local_sgd("replica", sync_every=1), sync_every=2),
    "fragments": js.diloco("replica", sync_every=2, fragments=2),
}


def trained(sync, axes, places, *, is_virtual, gradients, mode):
    """The mean after three steps, and the axes over which the step communicates."""
    mesh = (js.virtual_mesh if is_virtual else js.make_mesh)(axes)
    params = PARAMS
    if not is_virtual:
        laid = {name: NamedSharding(mesh, places[name]) for name in PARAMS}
        params = jax.device_put(PARAMS, laid)
    reduced = js.all_reduce_gradients(gradients) if gradients else None
    step = js.make_train_step(
        loss, optax.adam(0.1), sync=SYNCS[sync], gradients=reduced, mesh=mesh, mode=mode
    )
    state = step.init(params)
    rows = js.comm_report(step, state, BATCHES[0]).rows
    for batch in BATCHES:
        state, _ = step(state, batch)
    return jax.tree.map(np.asarray, step.consensus(state)), {row.axis for row in rows}


CHOSEN = [
    ("slowmo", "fsdp", "lies", "host"),
    ("local_sgd", "fsdp", "averaged", "traced"),
    ("sgp", "virtual", "lies", "traced"),
    ("fragments", "alone", "averaged", "traced"),
]


@pytest.mark.parametrize(("sync", "place", "what", "mode"), CHOSEN)
def test_a_step_trains_as_without_it(sync, place, what, mode):
    """Named in the layout of the parameters, and in the average of gradients."""
    specs = SPECS if place == "fsdp" else ALONE
    plain, inner = without(specs, "one"), {"fsdp": 2} if place == "fsdp" else {}
    options = {"is_virtual": place == "virtual", "mode": mode}
    averaged = ("replica", "one") if what == "averaged" else None
    wanted, over = trained(
        sync, {"replica": 2, **inner}, plain, gradients=averaged and "replica", **options
    )
    found, also_over = trained(
        sync, {"replica": 2, "one": 1, **inner}, specs, gradients=averaged, **options
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert not any("one" in str(axis) for axis in also_over), also_over
    assert len(over) == len(also_over)
