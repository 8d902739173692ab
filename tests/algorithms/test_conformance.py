"""Every public transform runs in loops, with wide leaves, idle replicas and other arrays."""

import functools
import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.executions import lift
from support.transforms import PARAMETER, TRANSFORMS, stacked

AXES = {"replica": 4}
SMALL = {"w": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)}
STEPS = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)  # for each replica
ELASTIC = ["easgd"]  # averages no parameters, and nothing else
GIVEN = PARAMETER[::4]
COLLECTIVES = ("psum", "all_gather", "reduce_scatter", "ppermute", "all_to_all")


def types(tree):
    return jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype)), tree)


def updated(tx, params, state, updates, **keywords):
    updates, state = tx.update(updates, state, params, **keywords)
    return optax.apply_updates(params, updates), state


def test_no_public_transform_is_missing():
    made = {name.split()[0] for name in TRANSFORMS}
    factories = {
        name
        for module in (js, js.gradients, js.sparse)
        for name, value in inspect.getmembers(module, inspect.isfunction)
        if inspect.isclass(returned := typing.get_type_hints(value).get("return"))
        and issubclass(returned, optax.GradientTransformation)
    }
    # Without those of others, which are here, and with one of js.pipeline and one of a user.
    # des_loc needs an optimizer: tests/train/step/test_inner_state.py has it.
    others = {"chain", "gradient_transform", "des_loc"}
    assert made == factories - others | {"sum_tied_gradients", "easgd"}


# Adam of optax itself relies on implicit promotion; so does ravel_pytree, of updates.
@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_update_is_the_body_of_a_loop(name, mesh_of):
    """The state is typed before an update as after it, or the scan refuses; arguments pass by.

    Under x64, too, in which only wide leaves stay wide. A state that is given varies over replicas.
    """
    tx = TRANSFORMS[name]()
    chain = optax.chain(tx, optax.identity())

    def run(params, state, weight):
        extra = {"value": jnp.ones([]), "of_something_else": "x", "weight": weight}

        def step(state, _):
            updates, state = chain.update(params, (*state, ()), params, **extra)
            return state[:1], updates

        starts = [tx.init(params), *([state] if name in GIVEN else [])]
        ends = [jax.lax.scan(step, (start,), length=3) for start in starts]
        if name in PARAMETER and name not in ELASTIC:
            others = [params["layer"]["half"], params["layer"]["a"]]
            _, others, _, _ = tx.exchange(params, others, starts[0], params, weight=weight)
            assert [x.dtype for x in others] == [jnp.bfloat16, jnp.float32]
        return starts, [state for (state,), _ in ends], ends[0][1]

    def per_device(*args):
        own = jax.tree.map(lambda x: x[0], args)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], run(*own))

    with jax.enable_x64("adam" not in name and name not in ELASTIC):
        params = stacked()
        if "merged" not in name:  # three dtypes for three buckets
            params["wide"] = jnp.ones((4, 3), float)
        state = jax.eval_shape(jax.vmap(tx.init, axis_name="replica"), params)
        mapped = jax.shard_map(
            per_device, mesh=mesh_of(AXES), in_specs=P("replica"), out_specs=P("replica")
        )
        before, after, updates = jax.eval_shape(mapped, params, state, jnp.ones(4))
    assert types(before) == types(after)

    def wanted(x):
        wide = name in PARAMETER and x.dtype.itemsize < 4
        return (4, 3, *x.shape[1:]), jnp.dtype(jnp.float32) if wide else x.dtype

    assert types(updates) == jax.tree.map(wanted, params)


# Of each kind one; `test_communication.py` has what they send.
KINDS = ["local_sgd in 4 bits", "sgp late", "slowmo over sgp", "noloco", "sparta", "diloco"]


@pytest.mark.parametrize("name", PARAMETER)
def test_without_an_exchange_parameters_move_by_the_updates(name):
    """`communicate=False` skips it, static or as an array; a local phase has no collective."""
    tx = TRANSFORMS[name]()
    params, grads = stacked(), stacked(scale=0.1)

    def step(params, grads, talk=False, **keywords):
        state = tx.init(params)._replace(count=jnp.full([], 3, jnp.int32))
        return tx.update(grads, state, params, communicate=talk, **keywords)

    mapped = lift(step, AXES, "shard_map", (False, False))
    program = str(jax.make_jaxpr(mapped)(params, grads))
    assert not [c for c in (*COLLECTIVES, "cond[") if c in program]
    if name not in KINDS:
        return
    mapped = jax.jit(jax.vmap(step, axis_name="replica", in_axes=(0, 0, None)))
    updates, state = mapped(params, grads, jnp.zeros([], bool))
    assert state.count.tolist() == [4] * 4
    for u, g in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        assert np.array_equal(np.asarray(u, np.float32), np.asarray(g, np.float32))


@functools.cache
def with_an_idle_replica():
    """Parameters and states after four updates of every transform, in one program."""
    poison = np.where(np.arange(4)[:, None] == 1, np.nan, STEPS).astype(np.float32)
    weights = np.array([1, 0, 2, 1], np.float32)

    def one(params, steps, weight):
        def run(tx):
            def update(run, _):
                return updated(tx, *run, {"w": steps}, weight=weight), None

            return jax.lax.scan(update, (params, tx.init(params)), length=4)[0]

        return {name: run(TRANSFORMS[name]()) for name in PARAMETER}

    return jax.jit(jax.vmap(one, axis_name="replica"))(SMALL, poison, weights)


@pytest.mark.xdist_group("conformance")
@pytest.mark.parametrize("name", PARAMETER)
def test_an_idle_replica_poisons_nobody(name):
    params, state = with_an_idle_replica()[name]
    for leaf in jax.tree.leaves((params, state)):
        assert np.all(np.isfinite(leaf))
    assert state.count.tolist() == [4] * 4
    assert not np.any(state.local["refused"] if name == "only_finite" else 0)


# What travels with the parameters


def others_of(tx):
    """Return parameters and other arrays after each of four updates by zeros; both start alike."""

    def one(params):
        zeros = jax.tree.map(jnp.zeros_like, params)

        def update(run, _):
            params, others, state = run
            updates, others, state, _ = tx.exchange(zeros, others, state, params)
            params = optax.apply_updates(params, updates)
            return (params, others, state), (params["w"], others[0])

        return jax.lax.scan(update, (params, [params["w"]], tx.init(params)), length=4)[1]

    seen = jax.jit(jax.vmap(one, axis_name="replica", out_axes=1))(SMALL)
    return list(zip(*map(np.asarray, seen), strict=True))


@pytest.mark.parametrize(
    "name",
    [
        "local_sgd scheduled", "local_sgd in 4 bits", "hierarchical_local_sgd", "slowmo",
        "slowmo inexact", "only_finite around slowmo", "slowmo over sparta", "diloco",
    ],
)  # fmt: skip
def test_other_arrays_are_averaged_where_parameters_are(name):
    tx = TRANSFORMS[name]()
    expected, mean = SMALL["w"], np.broadcast_to(SMALL["w"].mean(0), (4, 3))
    for t, (_, others) in enumerate(others_of(tx), start=1):
        expected = mean if tx.phase(t) else expected
        np.testing.assert_allclose(others, expected, atol=1e-6)
    assert expected is mean


# Names of fields


HYPERPARAMETERS = {
    "accumulator_dtype", "b1", "b2", "decay", "eps", "init_value", "learning_rate", "mask",
    "max_delta", "max_norm", "momentum", "nesterov", "power", "rate", "scale", "seed", "step_size",
    "step_size_fn", "threshold", "transition_steps", "weight_decay",
}  # fmt: skip


def test_no_field_has_the_name_of_a_hyperparameter_of_optax():
    """`optax.tree.set(state, learning_rate=...)` sets every field of that name in a chain."""
    fields = set()
    for make in TRANSFORMS.values():
        state = jax.eval_shape(jax.vmap(make().init, axis_name="replica"), stacked())
        for path, _ in jax.tree_util.tree_leaves_with_path(state):
            fields |= {key.name for key in path if hasattr(key, "name")}
    assert {"count", "velocity", "in_flight"} <= fields
    assert not fields & HYPERPARAMETERS
