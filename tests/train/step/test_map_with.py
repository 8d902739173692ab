"""`map_with="vmap"`: losses with shard_maps and constraints of their own inside a replica."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from train.libraries import BATCHES, SPECS, assert_close, loss_fn, placed

REPLICAS = 2

AXES = {"replica": REPLICAS, "data": 2, "fsdp": 2}
PARTS = {
    "sync": lambda: {"sync": js.diloco("replica", sync_every=3)},
    "gradients": lambda: {"gradients": js.all_reduce_gradients("replica")},
    "both": lambda: {
        "sync": js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4),
        "gradients": js.clip_by_global_norm(0.5),
    },
}


def nested_on(mesh):
    """Return the loss with a shard_map of its own over two axes, and a constraint."""
    spec = P("data", "fsdp")

    def hidden(x):
        per_device = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
        x = per_device(jnp.tanh)(x)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return functools.partial(loss_fn, hidden=hidden)


def trained(loss, mesh, parts, **options):
    step = js.make_train_step(
        loss, optax.adam(0.05, eps=1e-4), mesh=mesh, **PARTS[parts](), **options
    )
    state, found = step.init(placed(mesh)), []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        found.append(metrics)
    return step, state, jax.device_get(found)


@functools.cache
def known(parts):
    _, state, metrics = trained(loss_fn, js.virtual_mesh({"replica": REPLICAS}), parts)
    return jax.device_get(state.params), metrics


@pytest.mark.parametrize(
    ("parts", "mode"), [("gradients", "traced"), ("both", "host"), ("sync", "traced")]
)
def test_a_loss_with_maps_of_its_own_trains_as_virtual_replicas(parts, mode):
    mesh = js.make_mesh(AXES)
    step, state, metrics = trained(nested_on(mesh), mesh, parts, mode=mode, map_with="vmap")
    assert_close((state.params, metrics), known(parts))
    for name, x in state.params.items():
        lies = NamedSharding(mesh, P("replica", *SPECS[name]))
        assert x.sharding.is_equivalent_to(lies, x.ndim)
    report = js.comm_report(step, state, BATCHES[0])
    if "local" in report.kinds:
        assert not [row for row in report.select(kind="local") if "replica" in row.axis]


def test_what_a_local_step_sends_under_vmap_is_named_once(mesh_of):
    """A loop that runs as often as the data say runs as often on all replicas."""
    mesh, batch = mesh_of({"replica": 2, "fsdp": 4}), np.ones((16, 8), np.float32)

    def loss(params, batch):
        halved = jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, params["w"] ** 2)
        return jnp.mean((batch @ (params["w"] + jax.lax.stop_gradient(halved))) ** 2)

    options = {"mesh": mesh, "mode": "host", "map_with": "vmap"}
    sync = js.local_sgd("replica", sync_every=4)
    step = js.make_train_step(loss, optax.sgd(0.1), sync=sync, **options)
    lies = NamedSharding(mesh, P(None, "fsdp"))
    state = step.init({"w": jax.device_put(np.ones((8, 16), np.float32), lies)})
    with pytest.warns(UserWarning, match="A local step sends .*over replica.*`vmap`"):
        state, _ = step(state, batch)
    step(state, batch)  # a warning is an error in this suite
