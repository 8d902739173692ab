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
    """Parameters of all replicas after each of `updates`, `[steps, replicas, n]`."""

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


def test_exact_average_of_a_weighted_base():
    """sum of numerators / sum of weights, then `reset`: what gossip will need of the protocol."""
    plain = js.local_sgd("replica", sync_every=2)
    resets = []

    def numerator(state, y):
        weight = 1.0 + jax.lax.axis_index("replica")
        return jax.tree.map(lambda x: weight * x, y), weight

    weighted = js.ParameterTransform(
        plain.init,
        plain.update,
        phase=plain.phase,
        due=plain.due,
        schedules=plain.schedules,
        numerator=numerator,
        reset=lambda state: resets.append(1) or state,
    )
    slowmo = js.slowmo("replica", base=weighted, sync_every=4, momentum=0.0, shard_state=False)
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(4, 3, 5)).astype(np.float32)
    history = after_updates(slowmo, np.zeros((3, 5), np.float32), updates)
    before = history[2] + updates[3]
    expected = np.average(before, axis=0, weights=[1.0, 2.0, 3.0])
    np.testing.assert_allclose(history[3], np.broadcast_to(expected, (3, 5)), atol=1e-6)
    assert resets


@pytest.mark.parametrize(
    ("exact", "phase", "wanted"),
    [(True, ("slow",), {False}), (False, ("average", "slow"), {True})],
)
def test_a_base_is_asked_to_exchange_only_where_its_average_is_wanted(exact, phase, wanted):
    """In an exact slow step it counts on; else the slow step takes what it left."""
    plain, asked = js.local_sgd("replica", sync_every=1), []

    def exchange(updates, others, state, params, *, communicate=True, **extra):
        asked.append(communicate)
        return plain.exchange(updates, others, state, params, communicate=communicate, **extra)

    base = plain._replace(exchange=exchange)
    sgd = optax.with_extra_args_support(optax.sgd(1.0))
    sync = outer(sgd, base=base, exact_average=exact, shard_state=False).transform()
    update = lambda p: sync.update(p, sync.init(p), p, phase=phase)  # noqa: E731
    jax.eval_shape(jax.vmap(update, axis_name="replica"), jnp.ones((2, 3)))
    assert set(asked) == wanted


def trained_in_bf16(sync, sgd, apart):
    """Bits after 4 updates, with optimizer and transform in one program or in one each."""
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
    together = program(optax.chain(sgd, sync).update)
    for g in grads:
        if apart:
            updates, own = program(sgd.update)(g, own, params)
            updates, state = program(sync.update)(updates, state, params)
        else:
            updates, (own, state) = together(g, (own, state), params)
        params = program(optax.apply_updates)(params, updates)
    return np.asarray(params, np.float32)


@pytest.mark.parametrize(
    "sync",
    [
        js.slowmo("replica", base=js.sgp("replica"), sync_every=3),
        js.diloco("replica", sync_every=3),
        js.slowmo("replica", base=js.sgp("replica", overlap=1), sync_every=3),
        js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4),
    ],
    ids=["over sgp", "diloco", "over late sgp", "over local_sgd"],
)
def test_half_precision_updates_are_rounded_once_whatever_stands_before_them(sync):
    """An optimizer's update is rounded, also where the compiler could leave that out."""
    sgd = optax.sgd(0.1)
    np.testing.assert_array_equal(
        trained_in_bf16(sync, sgd, apart=False), trained_in_bf16(sync, sgd, apart=True)
    )
