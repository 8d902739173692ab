"""One outer step: the average, what the base is asked, what the optimizer is told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.algorithms.outer import Outer
from jaxslowmo.transform import as_schedule, checked_exchange


def after_updates(sync, params, updates):
    """Return parameters of all replicas after each of `updates`, `[steps, replicas, n]`."""

    def one(p, us):
        s, seen = sync.init(p), []
        for u in us:
            u, s = sync.update(u, s, p)
            p = optax.apply_updates(p, u)
            seen.append(p)
        return jnp.stack(seen)

    mapped = jax.vmap(one, axis_name="replica", in_axes=(0, 1), out_axes=1)
    return np.asarray(mapped(params, updates))


def outer(optimizer, **options) -> Outer:
    exchange = checked_exchange("outer", "replica")
    return Outer("outer", exchange, as_schedule(2), optimizer, **options)


def test_the_optimizer_sees_how_far_the_mean_has_moved():
    """D = anchor - mean of y, the anchor as parameters; and nothing of a learning rate."""
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append((updates, params, extra))
        return jax.tree.map(lambda u: -0.5 * u, updates), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    sync = outer(optimizer, shard_state=False).transform()
    start, updates = np.float32([[1], [1]]), np.float32([[[1], [2]], [[0], [1]]])
    history = after_updates(sync, start, updates)
    # y = 2 and 4: D = 1 - 3, and the anchor goes half of the way.
    np.testing.assert_allclose(history[:, :, 0], [[2, 3], [2, 2]])
    assert {tuple(extra) for _, _, extra in seen} == {()}


def trained_in_bf16(sync, sgd, apart):
    """Return bits after 4 updates, with optimizer and transform in one program or in one each."""
    mesh = js.make_mesh({"replica": 4})
    sync = sync.sized({"replica": 4})
    random = np.random.default_rng(0)
    params, *grads = jnp.asarray(random.normal(size=(5, 4, 200)), jnp.bfloat16)

    def program(fn):
        def one(*args):
            return jax.tree.map(lambda x: x[None], fn(*jax.tree.map(lambda x: x[0], args)))

        specs = jax.sharding.PartitionSpec("replica")
        return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=specs))

    own, state = program(sgd.init)(params), program(sync.init)(params)
    together, applied = program(optax.chain(sgd, sync).update), program(optax.apply_updates)
    first, second = program(sgd.update), program(sync.update)
    for g in grads:
        if apart:
            updates, own = first(g, own, params)
            updates, state = second(updates, state, params)
        else:
            updates, (own, state) = together(g, (own, state), params)
        params = applied(params, updates)
    return np.asarray(params, np.float32)


@pytest.mark.parametrize(
    "sync",
    [
        js.slowmo("replica", base=js.sgp("replica"), sync_every=3),
        js.diloco("replica", sync_every=3),
    ],
    ids=["over sgp", "diloco"],
)
def test_half_precision_updates_are_rounded_once_whatever_stands_before_them(sync):
    """An optimizer's update is rounded, also where the compiler could leave that out."""
    sgd = optax.sgd(0.1)
    np.testing.assert_array_equal(
        trained_in_bf16(sync, sgd, apart=False), trained_in_bf16(sync, sgd, apart=True)
    )
