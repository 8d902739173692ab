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
from support.transforms import IRREGULAR, PARAMETER, TRANSFORMS, stacked

AXES = {"replica": 4}
SMALL = {"w": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)}
STEPS = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)  # for each replica
GOSSIP = [name for name in PARAMETER if name.startswith(("sgp", "slowmo over sgp"))]
PAIRS = [name for name in PARAMETER if name.startswith("noloco")]
ELASTIC = ["easgd"]  # averages no parameters, and nothing else
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


@pytest.mark.parametrize("given", [False, True], ids=["made inside", "given"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_update_is_the_body_of_a_loop(name, given, mesh_of):
    """The state is typed before an update as after it, or the scan refuses; arguments pass by."""
    tx = TRANSFORMS[name]()
    chain = optax.chain(tx, optax.identity())

    def run(params, state):
        start = (state,) if given else (tx.init(params),)
        extra = {"value": jnp.ones([]), "of_something_else": "x"}

        def step(state, _):
            updates, state = chain.update(params, (*state, ()), params, **extra)
            return state[:1], updates

        return jax.lax.scan(step, start, length=3)

    def per_device(params, state):
        own = jax.tree.map(lambda x: x[0], (params, state))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], run(*own))

    params = stacked()
    state = jax.eval_shape(jax.vmap(tx.init, axis_name="replica"), params)
    mapped = jax.shard_map(
        per_device, mesh=mesh_of(AXES), in_specs=P("replica"), out_specs=P("replica")
    )
    (after,), updates = jax.eval_shape(mapped, params, state)
    assert types(after) == types(state)

    def wanted(x):
        wide = name in PARAMETER and x.dtype.itemsize < 4
        return (4, 3, *x.shape[1:]), jnp.dtype(jnp.float32) if wide else x.dtype

    assert types(updates) == jax.tree.map(wanted, params)


# Adam of optax itself relies on implicit promotion; so does ravel_pytree, of updates.
@pytest.mark.parametrize("name", [n for n in TRANSFORMS if "adam" not in n and n not in ELASTIC])
def test_types_are_explicit_under_x64(name):
    """This holds for updates with weights and other arrays, too; only wide leaves stay wide."""
    tx = TRANSFORMS[name]()

    def step(params, weight):
        state = tx.init(params)
        updates, after = tx.update(params, state, params, weight=weight)
        if name in PARAMETER:
            others = [params["layer"]["half"], params["layer"]["a"]]
            updates, others, after, _ = tx.exchange(params, others, state, params, weight=weight)
            assert [x.dtype for x in others] == [jnp.bfloat16, jnp.float64]
        return state, after, updates

    with jax.enable_x64(True):
        dtypes = {"a": jnp.float64, "single": jnp.float32, "half": jnp.bfloat16}
        leaves = {key: jax.ShapeDtypeStruct((4, 3), dtype) for key, dtype in dtypes.items()}
        params = {"layer": leaves}  # named as those of `support.transforms`
        weight = jax.ShapeDtypeStruct((4,), jnp.float64)
        program = lift(step, AXES, "shard_map", (False, False))
        before, after, updates = jax.eval_shape(program, params, weight)
    assert types(before) == types(after)
    for key in ("a", "single"):
        assert updates["layer"][key].dtype == dtypes[key]


@pytest.mark.parametrize("name", PARAMETER)
def test_without_an_exchange_parameters_move_by_the_updates(name):
    """`communicate=False` skips it, static or as an array; a local phase has no collective."""
    tx = TRANSFORMS[name]()
    params, grads = stacked(), stacked(scale=0.1)

    def step(params, grads, **keywords):
        state = tx.init(params)._replace(count=jnp.full([], 3, jnp.int32))
        return tx.update(grads, state, params, **keywords)

    def program(**keywords):
        mapped = lift(functools.partial(step, **keywords), AXES, "shard_map", (False, False))
        return str(jax.make_jaxpr(mapped)(params, grads))

    for keywords in ({"phase": ()}, {"communicate": False}):
        assert not [c for c in (*COLLECTIVES, "cond[") if c in program(**keywords)]
    due = next(phase for phase in tx.phases() if phase)
    assert [c for c in COLLECTIVES if c in program(phase=due)]

    asked = lambda params, grads, talk: step(params, grads, communicate=talk)  # noqa: E731
    mapped = jax.jit(jax.vmap(asked, axis_name="replica", in_axes=(0, 0, None)))
    updates, state = mapped(params, grads, jnp.zeros([], bool))
    assert state.count.tolist() == [4] * 4
    for u, g in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        assert np.array_equal(np.asarray(u, np.float32), np.asarray(g, np.float32))


@pytest.mark.parametrize("name", PARAMETER)
def test_an_idle_replica_poisons_nobody(name):
    tx = TRANSFORMS[name]()
    poison = np.where(np.arange(4)[:, None] == 1, np.nan, STEPS).astype(np.float32)
    weights = np.array([1, 0, 2, 1], np.float32)

    def one(params, steps, weight):
        def update(run, _):
            return updated(tx, *run, {"w": steps}, weight=weight), None

        return jax.lax.scan(update, (params, tx.init(params)), length=4)[0]

    params, state = jax.jit(jax.vmap(one, axis_name="replica"))(SMALL, poison, weights)
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
    "name", [name for name in PARAMETER if name not in GOSSIP + PAIRS + ELASTIC]
)
def test_other_arrays_are_averaged_where_parameters_are(name):
    tx = TRANSFORMS[name]()
    expected, mean = SMALL["w"], np.broadcast_to(SMALL["w"].mean(0), (4, 3))
    for t, (_, others) in enumerate(others_of(tx), start=1):
        expected = mean if tx.phase(t) else expected
        np.testing.assert_allclose(others, expected, atol=1e-6)
    assert expected is mean


@pytest.mark.parametrize("name", GOSSIP)
def test_gossip_mixes_other_arrays_at_once(name):
    graph = js.topology.ring(4) if name == "sgp on one round" else IRREGULAR
    p = js.topology.mixing_matrix(graph, None, 0)
    seen = [others for _, others in others_of(TRANSFORMS[name]())]
    np.testing.assert_allclose(seen[0], p @ SMALL["w"] / p.sum(1, keepdims=True), atol=1e-6)
    if name == "slowmo over sgp":  # the fourth is an exact average
        assert np.ptp(seen[2], axis=0).max() > 0.1
        np.testing.assert_allclose(seen[3], np.broadcast_to(seen[3][0], (4, 3)), atol=1e-6)


# Names of fields

# Parameters of optax's factories that are no hyperparameters: what they wrap.
WRAPPED = {"inner", "init", "update", "base_optimizer", "optimizer"}


def hyperparameters_of_optax() -> set[str]:
    factories = [
        value
        for module in (optax, optax.contrib)
        for name, value in inspect.getmembers(module, callable)
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    names = {
        name
        for factory in factories
        for signature in [inspect.signature(factory)]
        if "GradientTransformation" in str(signature.return_annotation)
        for name in signature.parameters
    }
    return names - WRAPPED


def state_types(tx):
    return jax.eval_shape(jax.vmap(tx.init, axis_name="replica"), stacked())


def fields_of_ours(tree) -> set[str]:
    """Return the fields of all states of this package in a state, those inside of others too."""
    found: set[str] = set()

    def visit(x):
        if hasattr(x, "_fields"):
            found.update(x._fields if type(x).__module__.startswith("jaxslowmo") else ())
            for field in x:
                jax.tree.leaves(field, is_leaf=visit)
        return False

    jax.tree.leaves(tree, is_leaf=visit)
    return found


def test_no_field_has_the_name_of_a_hyperparameter_of_optax():
    """`optax.tree.set(state, learning_rate=...)` sets every field of that name in a chain."""
    reserved = hyperparameters_of_optax()
    assert {"learning_rate", "momentum", "b1", "weight_decay", "decay", "scale"} <= reserved
    fields = set().union(*(fields_of_ours(state_types(make())) for make in TRANSFORMS.values()))
    assert {"count", "velocity", "in_flight"} <= fields
    assert not fields & reserved
