"""What every public transform must bear: loops, further vmaps, idle replicas, misuse."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.executions import lift
from support.exhaustive import sweep
from support.transforms import IRREGULAR, PARAMETER, TRANSFORMS, stacked

AXES = {"replica": 4}
UNDER_VMAP = ("only_finite around slowmo", "sgp later", "slowmo over sgp", "diloco")
SMALL = {"w": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)}
STEPS = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)  # for each replica


def updated(tx, params, state, updates, **keywords):
    updates, state = tx.update(updates, state, params, **keywords)
    return optax.apply_updates(params, updates), state


# Loops under the default check of shard_map


@pytest.mark.parametrize("given", [False, True], ids=["made inside", "given"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_update_is_the_body_of_a_loop(name, given, mesh_of):
    """The state is typed before an update as after it, or the scan refuses."""
    tx = TRANSFORMS[name]()

    def run(params, state):
        start = state if given else tx.init(params)
        step = lambda s, _: (tx.update(params, s, params)[1], None)  # noqa: E731
        return jax.lax.scan(step, start, length=3)[0]

    def per_device(params, state):
        own = jax.tree.map(lambda x: x[0], (params, state))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], run(*own))

    params = stacked()
    state = jax.eval_shape(jax.vmap(tx.init, axis_name="replica"), params)
    mapped = jax.shard_map(
        per_device, mesh=mesh_of(AXES), in_specs=P("replica"), out_specs=P("replica")
    )
    after = jax.eval_shape(mapped, params, state)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


# Several runs at once


def trained(tx, params, steps, communicate):
    def one(run, talk):
        return updated(tx, *run, {"w": steps}, communicate=talk), None

    return jax.lax.scan(one, (params, tx.init(params)), communicate)[0]


# A name on the outer axis changes what is bound, for all alike.
@pytest.mark.parametrize(
    ("name", "axis_name"),
    sweep(
        itertools.product(PARAMETER, [None, "run"]),
        lambda name, axis_name: name in UNDER_VMAP and (axis_name is None or "sgp" in name),
    ),
)
def test_runs_under_an_outer_vmap_are_as_they_are_alone(name, axis_name):
    """One run communicates, the other does not; and their counters differ."""
    tx = TRANSFORMS[name]()
    talks = np.array([[True, True, True], [False, True, False]])

    def of_replicas(params, steps, talks, more):
        def one(params, steps):
            params, state = trained(tx, params, steps, talks)
            state = state._replace(count=state.count + more)
            return updated(tx, params, state, {"w": steps})

        return jax.vmap(one, axis_name="replica")(params, steps)

    more = np.array([0, 3], np.int32)
    both = jax.jit(jax.vmap(of_replicas, in_axes=(None, None, 0, 0), axis_name=axis_name))(
        SMALL, STEPS, talks, more
    )
    alone = jax.jit(of_replicas)
    for run in range(2):
        expected = alone(SMALL, STEPS, talks[run], more[run])
        for found, wanted in zip(jax.tree.leaves(both), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found[run], wanted, rtol=1e-6, atol=1e-6)


# Replicas that have run out of data


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
    assert not np.any(state.refused if name == "only_finite" else 0)


# What travels with the parameters


def others_of(tx):
    """Parameters and other arrays after each of four updates by zeros; both start alike."""

    def one(params):
        zeros = jax.tree.map(jnp.zeros_like, params)

        def update(run, _):
            params, others, state = run
            updates, others, state = tx.exchange(zeros, others, state, params)
            params = optax.apply_updates(params, updates)
            return (params, others, state), (params["w"], others[0])

        return jax.lax.scan(update, (params, [params["w"]], tx.init(params)), length=4)[1]

    seen = jax.jit(jax.vmap(one, axis_name="replica", out_axes=1))(SMALL)
    return list(zip(*map(np.asarray, seen), strict=True))


GOSSIP = [name for name in PARAMETER if name.startswith(("sgp", "slowmo over sgp"))]


ELASTIC = ["parameter_transform"]  # averages no parameters, and nothing else


@pytest.mark.parametrize("name", [name for name in PARAMETER if name not in GOSSIP + ELASTIC])
def test_other_arrays_are_averaged_where_parameters_are(name):
    tx = TRANSFORMS[name]()
    expected, mean = SMALL["w"], np.broadcast_to(SMALL["w"].mean(0), (4, 3))
    for t, (_, others) in enumerate(others_of(tx), start=1):
        expected = mean if tx.phase(t) else expected
        np.testing.assert_allclose(others, expected, atol=1e-6)
    assert expected is mean


@pytest.mark.parametrize("name", GOSSIP)
def test_gossip_mixes_other_arrays_as_parameters_and_at_once(name):
    graph = js.topology.ring(4) if name == "sgp on one round" else IRREGULAR
    (params, mixed), *_ = others_of(js.sgp("replica", graph=graph))
    np.testing.assert_allclose(mixed, params, atol=1e-6)
    seen = others_of(TRANSFORMS[name]())
    np.testing.assert_allclose(seen[0][1], mixed, atol=1e-6)
    if name == "slowmo over sgp":  # the fourth is an exact average
        assert np.ptp(seen[2][1], axis=0).max() > 0.1
        np.testing.assert_allclose(seen[3][1], np.broadcast_to(seen[3][1][0], (4, 3)), atol=1e-6)


# Wide leaves beside narrow ones


@pytest.mark.parametrize("name", [n for n in TRANSFORMS if "adam" not in n and n not in ELASTIC])
def test_types_are_explicit_under_x64(name, strict_promotion):
    """Of updates with weights and other arrays, too; optax's Adam and ravel_pytree promote."""
    tx = TRANSFORMS[name]()

    def step(params, weight):
        state = tx.init(params)
        _, state = tx.update(params, state, params)
        if name in PARAMETER:
            others = [params["layer"]["half"], params["layer"]["a"]]
            return tx.exchange(params, others, state, params, weight=weight)[2]
        return tx.update(params, state, params, weight=weight)[1]

    with jax.enable_x64(True):
        dtypes = {"a": jnp.float64, "single": jnp.float32, "half": jnp.bfloat16}
        leaves = {key: jax.ShapeDtypeStruct((4, 3), dtype) for key, dtype in dtypes.items()}
        params = {"layer": leaves}  # named as those of `support.transforms`
        weight = jax.ShapeDtypeStruct((4,), jnp.float64)
        jax.eval_shape(lift(step, AXES, "shard_map", (False, False)), params, weight)


# Misuse


@functools.cache
def state_of(name):
    """Zeros like the state of one replica."""
    found = []
    params = jax.tree.map(lambda x: x[0], SMALL)
    make = lambda _: found.append(TRANSFORMS[name]().init(params)) or _  # noqa: E731
    jax.eval_shape(jax.vmap(make, axis_name="replica"), jnp.ones(4))
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), found[0])


@pytest.mark.parametrize("name", PARAMETER)
def test_states_of_others_are_refused(name):
    """Of every other transform whose state is not the very same in structure and types."""
    tx = TRANSFORMS[name]()
    form = lambda s: (jax.tree.structure(s), [(x.shape, x.dtype) for x in jax.tree.leaves(s)])  # noqa: E731
    own = form(state_of(name))
    others = {other: state_of(other) for other in PARAMETER}
    differing = [state for state in others.values() if form(state) != own]
    assert len(differing) > len(others) / 2
    for state in differing:
        update = lambda p, s=state: tx.update(p, s, p)[0]  # noqa: E731
        with pytest.raises(ValueError, match=r"`state` must be what this transform's `init` makes"):
            jax.eval_shape(jax.vmap(update, axis_name="replica"), SMALL)


def unvarying(tx, params_vary, updates_vary):
    """An update under shard_map's default check of parameters and updates of given types."""
    specs = tuple(P("replica") if vary else P() for vary in (params_vary, updates_vary))

    def step(params, updates):
        start = jax.tree.map(lambda x: jax.lax.pcast(x, ("replica",), to="varying"), params)
        state = tx.init(params if params_vary else start)
        return jax.tree.map(jnp.sum, tx.update(updates, state, params)[0])

    trees = {"w": jnp.ones((4, 3))}, {"w": jnp.ones((4, 3))}
    mapped = jax.shard_map(
        step, mesh=js.make_mesh(AXES), in_specs=specs, out_specs=P(), check_vma=True
    )
    return jax.eval_shape(lambda *a: jax.tree.map(lambda x: x, mapped(*a)), *trees)


@pytest.mark.parametrize("name", PARAMETER)
def test_parameters_that_are_equal_by_their_types_are_refused(name):
    """Jax has summed their gradients over the replicas already."""
    said = r"parameters and updates must differ.* w \(over 'replica'\).*pcast"
    with pytest.raises(ValueError, match=said):
        unvarying(TRANSFORMS[name](), False, False)


@pytest.mark.parametrize("name", PARAMETER)
def test_equal_updates_of_differing_parameters_are_legal(name):
    """As of gradients that were averaged before."""
    tx = TRANSFORMS[name]()

    def step(params, updates):
        updates = jax.tree.map(lambda u: jax.lax.pmean(u, "replica"), updates)
        return tx.update(updates, tx.init(params), params)[0]

    jax.eval_shape(lift(step, AXES, "shard_map", (False, False)), SMALL, SMALL)
