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
HOOKS = {
    "bf16_compress": BF16,
    "int8": js.hooks.int8(block_size=4, stochastic_rounding=True),
    "top_k": js.hooks.top_k(0.2),
    "powersgd": js.hooks.powersgd(1, 2, min_compression_rate=0.1),
    "powersgd forgetful": js.hooks.powersgd(
        1, 0, error_feedback=False, warm_start=False, min_compression_rate=0.1
    ),
}
# Momentum and a count; optax.adam relies on implicit promotion.
INNER = optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda _: 0.1))
TRANSFORMS = {
    **{f"all_reduce_gradients {name}": reduce(hook) for name, hook in HOOKS.items()},
    "demo": js.demo("replica", top_k=2, chunk=4),
    "accumulate int8": js.gradients.accumulate(js.chain(reduce(js.hooks.int8()), INNER), every=2),
    "all_reduce_rows beside": js.sparse.all_reduce_rows(
        "replica", tables=("m",), dense=reduce(js.hooks.int8()), capacity=1
    ),
    "all_reduce_rows as rows": js.sparse.all_reduce_rows("replica", tables=("m",), output="rows"),
    # It counts over all axes that gradients differ over.
    "skip_unused": js.gradients.skip_unused(
        optax.chain(reduce(js.hooks.int8()), INNER), ("replica", "model")
    ),
    "sum_tied_gradients": js.pipeline.sum_tied_gradients("replica", [{0: "m", 1: "m"}]),
    "dynamic_loss_scale": js.dynamic_loss_scale(optax.chain(reduce(), INNER)),
}
MESH = {"replica": 2, "model": 2}
PARAMS = {"m": jnp.ones((2, 4, 6)), "v": jnp.ones((2, 6))}
# Parameters that are equal on all replicas, and those of each replica, in parts.
LAYOUTS = {
    "equal": {"m": P(), "v": P()},
    "in parts": {"m": P("replica", "model"), "v": P("replica", "model")},
}


def three_updates(tx, params, weighted):
    own = 1.0 + jax.lax.axis_index("replica").astype(jnp.float32)
    extra = {"weight": own} if weighted else {}
    # They differ between replicas, whatever the parameters do.
    grads = jax.tree.map(lambda p: p * own, params)

    def update(state, _):
        return tx.update(grads, state, params, **extra)[1], ()

    return jax.lax.scan(update, tx.init(params), length=3)[0]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_state_made_inside(name):
    """With a weight, which varies; where parameters are equal without one, too."""
    tx = TRANSFORMS[name]
    for layout, specs in LAYOUTS.items():
        for weighted in (False, True) if layout == "equal" else (True,):

            def inside(params, weighted=weighted):
                three_updates(tx, jax.tree.map(lambda x: x[0], params), weighted)

            program = jax.shard_map(
                inside, mesh=js.make_mesh(MESH), in_specs=(specs,), out_specs=P()
            )
            jax.eval_shape(program, PARAMS)  # types are checked when a program is traced


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
