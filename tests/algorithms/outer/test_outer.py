"""An outer step in half precision: updates are rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js
from support.promotion import apply_updates


def trained_in_bf16(sync, sgd, apart):
    """Return bits after 4 updates, with optimizer and transform in one program or in one each."""
    mesh = js.make_mesh({"replica": 4})
    sync = sync.bound({"replica": 4})
    random = np.random.default_rng(0)
    params, *grads = jnp.asarray(random.normal(size=(5, 4, 200)), jnp.bfloat16)

    def program(fn):
        def one(*args):
            return jax.tree.map(lambda x: x[None], fn(*jax.tree.map(lambda x: x[0], args)))

        specs = jax.sharding.PartitionSpec("replica")
        return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=specs))

    own, state = program(sgd.init)(params), program(sync.init)(params)
    together, applied = program(optax.chain(sgd, sync).update), program(apply_updates)
    first, second = program(sgd.update), program(sync.update)
    for g in grads:
        if apart:
            updates, own = first(g, own, params)
            updates, state = second(updates, state, params)
        else:
            updates, (own, state) = together(g, (own, state), params)
        params = applied(params, updates)
    return np.asarray(params, np.float32)


def test_half_precision_updates_are_rounded_once_whatever_stands_before_them():
    """An optimizer's update is rounded, also where the compiler could leave that out."""
    sync = js.slowmo("replica", base=js.sgp("replica"), sync_every=3)
    sgd = optax.sgd(0.1)
    np.testing.assert_array_equal(
        trained_in_bf16(sync, sgd, apart=False), trained_in_bf16(sync, sgd, apart=True)
    )
