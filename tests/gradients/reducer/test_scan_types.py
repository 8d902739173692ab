"""States of gradient transforms keep their types, also in which axes they vary over.

`lax.scan` carries what does not change its type. Under `shard_map(check_vma=True)` the axes over
which a value varies are part of that.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js


def reduce(hook=None):
    return js.all_reduce_gradients("replica", hook=hook)


BF16 = js.hooks.bf16_compress()


EQUAL = {
    "optax's chain": optax.chain(reduce(), optax.adam(0.1)),
    "a hook": js.chain(reduce(BF16), optax.adam(0.1)),
    "clipped": js.chain(reduce(), js.clip_by_global_norm(1.0), optax.adam(0.1)),
    "skipping": js.gradients.skip_unused(js.chain(reduce(), optax.adam(0.1)), "replica"),
    "scaled": js.dynamic_loss_scale(js.chain(reduce(), optax.adam(0.1))),
    "rows": js.chain(
        js.sparse.all_reduce_rows("replica", tables=("m",), dense=reduce()), optax.adam(0.1)
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_reduced_stays_equal(name):
    """Data parallelism as users write it: parameters and state are equal on all, by their types."""
    tx = EQUAL[name]

    def step(params, state, batch):
        own = jax.lax.pcast(params, "replica", to="varying")
        grads = jax.grad(lambda p: sum(jnp.mean(x * batch.mean()) for x in jax.tree.leaves(p)))(own)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mesh = js.make_mesh({"replica": 4})
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=P())
    specs = {"in_specs": (P(), P(), P("replica")), "out_specs": P()}
    params = {"m": jnp.ones((4, 6)), "v": jnp.ones(6)}
    state = jax.eval_shape(init, params)
    jax.eval_shape(jax.shard_map(step, mesh=mesh, **specs), params, state, jnp.ones(4))
