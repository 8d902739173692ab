"""Tests of the consensus of replicas with unequal weights, or with values in flight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.checkpoint._convert import _consensus as host_consensus
from jaxslowmo.mesh._consensus import _consensus_fn
from jaxslowmo.transform import StatePlacement

REPLICAS, RATE, STEPS = 4, 0.25, 7
STAR = js.topology.star(REPLICAS)
SYNCS = {
    "star": js.sgp("replica", graph=STAR),
    "overlap": js.sgp("replica", overlap=3),
    "star, overlap": js.sgp("replica", graph=STAR, overlap=3),
    "slowmo over star": js.slowmo("replica", base=js.sgp("replica", graph=STAR), sync_every=4),
    "only finite, overlap": js.only_finite(js.sgp("replica", overlap=3)),
}
START = {"h": np.ones(2, jnp.bfloat16), "w": np.arange(6, dtype=np.float32).reshape(2, 3)}
RNG = np.random.default_rng(0)
BATCHES = {
    "h": RNG.integers(-2, 3, size=(STEPS, REPLICAS, 2)).astype(np.float32),
    "w": RNG.normal(np.arange(4.0)[:, None, None], size=(STEPS, 4, 2, 3)).astype(np.float32),
}


def linear(params, batch):
    """Return a loss whose gradient is the batch, so that the mean of the replicas is known."""
    return sum(jnp.vdot(params[name].astype(jnp.float32), batch[name][0]) for name in params)


EXACT = START["w"] - RATE * BATCHES["w"].astype(np.float64).mean(1).sum(0)


@functools.cache
def params_and_shares(name):
    """Train on virtual replicas; return the parameters and their shares as NumPy arrays."""
    step = js.make_train_step(
        linear, optax.sgd(RATE), sync=SYNCS[name], mesh=js.virtual_mesh({"replica": REPLICAS})
    )
    state = step.init(START)
    for t in range(STEPS):
        state, _ = step(state, {key: jnp.asarray(x[t]) for key, x in BATCHES.items()})
    shares = step.sync.shares(state.opt_state[-1])
    return jax.tree.map(np.asarray, (state.params, shares))


def as_float64(x):
    return np.asarray(x).astype(np.float64)


@pytest.fixture(params=["virtual", "devices", "explicit", "inner axis"])
def mesh(request, mesh_of):
    axes = {"replica": REPLICAS}
    if request.param == "virtual":
        return js.virtual_mesh(axes)
    if request.param == "inner axis":
        return mesh_of({**axes, "device": 2})
    return mesh_of(axes, explicit=request.param == "explicit")


@pytest.mark.parametrize("name", SYNCS)
def test_gossip_has_the_weighted_mean_of_replicas_and_values_in_flight(name, mesh):
    params, shares = params_and_shares(name)
    one = js.consensus(params, mesh=mesh, shares=shares)
    np.testing.assert_allclose(one["w"], EXACT, rtol=1e-5)
    assert np.abs(params["w"].mean(0) - EXACT).max() > 0.01  # the plain mean is another model
    # A run that is resumed on another number of replicas starts from the same.
    four_replicas, one_replica = (
        StatePlacement(REPLICAS, {"replica": REPLICAS}),
        StatePlacement(1, {"replica": 1}),
    )
    again = host_consensus(params, shares, four_replicas, one_replica)
    np.testing.assert_allclose(one["w"], again["w"][0], rtol=1e-6)
    assert one["h"].dtype == again["h"].dtype == jnp.bfloat16
    np.testing.assert_allclose(as_float64(one["h"]), as_float64(again["h"][0]), rtol=2.0**-8)
    if not isinstance(mesh, js.VirtualMesh):
        for leaf in one.values():
            copies = [np.asarray(s.data) for s in leaf.addressable_shards]
            assert len(copies) == mesh.size
            assert all(np.array_equal(c, copies[0]) for c in copies)


def test_equal_weights_give_the_plain_mean_to_the_bit(mesh):
    rng = np.random.default_rng(1)
    params = {
        "h": rng.normal(size=(REPLICAS, 50)).astype(jnp.bfloat16),
        "w": rng.normal(size=(REPLICAS, 50)).astype(np.float32),
    }
    plain = js.consensus(params, mesh=mesh)
    default = js.local_sgd("replica").shares(None)
    for shares in (default, [(np.ones(REPLICAS, np.float32), None)]):
        one = js.consensus(params, mesh=mesh, shares=shares)
        for key, x in plain.items():
            assert np.array_equal(np.asarray(one[key]), np.asarray(x))


def test_shares_may_be_of_scalars_and_of_other_parameters(mesh):
    """Weights per replica and one for all, other parameters, and an integer leaf."""
    rng = np.random.default_rng(2)
    params = {
        "n": np.arange(4, dtype=np.int32) + 3,
        "w": rng.normal(size=(4, 5)).astype(np.float32),
    }
    late = {"n": np.zeros(4, np.int32), "w": rng.normal(size=(4, 5)).astype(np.float32)}
    weights = np.array([0, 1, 2, 5], np.float32)
    one = js.consensus(params, mesh=mesh, shares=[(weights, None), (0.5, late), (2, None)])
    mass = (weights + 2) @ params["w"].astype(np.float64) + 0.5 * late["w"].sum(0)
    np.testing.assert_allclose(one["w"], mass / (8 + 4 * 2.5), rtol=1e-5)
    assert int(one["n"]) == 3


def test_large_weights_and_small_leaves_keep_their_digits(strict_promotion):
    """The total weight, 257, is not representable in bfloat16."""
    params = {"h": np.array([[1], [2]], jnp.bfloat16), "w": np.array([[1], [2]], np.float32)}
    shares = [(np.array([256, 1], np.float32), None)]
    one = js.consensus(params, mesh=js.virtual_mesh({"replica": 2}), shares=shares)
    np.testing.assert_allclose(one["w"], [258 / 257], rtol=1e-7)
    assert float(one["h"][0]) == 1.0


def test_leaves_that_are_sharded_inside_a_replica_stay_sharded(mesh_of):
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    placed = {"w": jax.device_put(x, NamedSharding(mesh, P("replica", "fsdp")))}
    weights = np.array([1, 3], np.float32)
    one = js.consensus(placed, mesh=mesh, shares=[(weights, None), (weights, placed)])
    assert one["w"].sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp")), 1)
    assert np.array_equal(one["w"], weights @ x / 4)


def test_it_sends_one_all_reduce_per_leaf_and_one_for_the_weights(mesh_of):
    mesh = mesh_of({"replica": REPLICAS})
    params, shares = params_and_shares("overlap")
    weights, values = zip(*shares, strict=True)
    lowered = _consensus_fn(mesh, "replica", frozenset()).lower(weights, (params, *values[1:]))
    report = js.comm_report_of(lowered, compile=False)
    assert report.count(axis="replica", collective="all-reduce") == report.count() == 3
    assert report.bytes() == 4 * 6 + 4 * 2 + 4  # float32 of all leaves and of the total weight


PARAMS = {"w": np.ones((2, 3), np.float32)}


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([], r"got \[\]\."),
        (lambda state: [], r"got <function"),
        ([1.0], r"got a float as number 0\."),
        ([(1.0, None), (1.0, None, None)], r"got a tuple as number 1\."),
        ([(np.ones(3), None)], r"got weights of shape \(3,\) as number 0\."),
        ([(1.0, None), (1.0, {"v": PARAMS["w"]})], r"parameters of other names .* as number 1\."),
        ([(1.0, {"w": np.ones((2, 4))})], r"got parameters of other .*shapes as number 0\."),
    ],
)
def test_other_shares_are_refused(shares, message):
    expected = r"`shares` must be pairs of weights of shape \(2,\).*" + message
    with pytest.raises(ValueError, match=expected):
        js.consensus(PARAMS, mesh=js.virtual_mesh({"replica": 2}), shares=shares)


@pytest.mark.parametrize("weighted", [False, True])
def test_one_replica_whose_leaves_are_sharded_inside_is_its_own_consensus(weighted):
    mesh = js.make_mesh({"replica": 1, "device": 8})
    params = {"w": np.arange(16.0, dtype=np.float32).reshape(1, 8, 2), "n": np.ones((1, 3), int)}
    specs = {"w": P("replica", "device"), "n": P("replica")}
    params = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
    shares = [(np.array([3.0], np.float32), None)] if weighted else None
    one = js.consensus(params, mesh=mesh, shares=shares)
    np.testing.assert_array_equal(one["w"], params["w"][0])
    np.testing.assert_array_equal(one["n"], params["n"][0])
    assert one["w"].sharding.spec == P("device")


STEPS_OF = {  # a step whose replicas count differently, and where its exchange stands
    "sync": lambda name, **options: js.make_train_step(
        linear, optax.sgd(RATE), sync=SYNCS[name], **options
    ),
    "optimizer": lambda name, **options: js.make_train_step(
        linear, optax.chain(optax.sgd(RATE), SYNCS[name]), **options
    ),
}


@pytest.mark.parametrize("place", STEPS_OF)
@pytest.mark.parametrize("name", ["star", "star, overlap", "slowmo over star"])
def test_a_step_weighs_its_replicas(name, place):
    step = STEPS_OF[place](name, mesh=js.virtual_mesh({"replica": REPLICAS}))
    state = step.init(START)
    for t in range(STEPS):
        state, _ = step(state, {key: jnp.asarray(x[t]) for key, x in BATCHES.items()})
    one = step.consensus(state)
    np.testing.assert_allclose(one["w"], EXACT, rtol=1e-5)
    assert np.abs(np.asarray(state.params["w"]).mean(0) - EXACT).max() > 0.01
    evaluate = js.Evaluate(lambda params, _: {"w": params["w"]}, mesh=step.mesh)
    result = js.StepResult(STEPS, state, (), {}, {})
    np.testing.assert_array_equal(evaluate(result)["w"], one["w"])
    with pytest.raises(ValueError, match=r"`state` must be a js\.TrainState"):
        step.consensus(state.params)


def test_a_step_with_equal_weights_gives_the_plain_mean():
    mesh = js.virtual_mesh({"replica": REPLICAS})
    step = js.make_train_step(linear, optax.sgd(RATE), sync=js.local_sgd("replica"), mesh=mesh)
    state = step.init(START)
    state, _ = step(state, {key: jnp.asarray(x[0]) for key, x in BATCHES.items()})
    jax.tree.map(
        np.testing.assert_array_equal,
        step.consensus(state),
        js.consensus(state.params, mesh=mesh),
    )
    assert step.shares(state) == [(1.0, None)]


def step_and_state_of_groups(first, second):
    groups = optax.partition({"a": first, "b": second}, {"h": "a", "w": "b"})
    mesh = js.virtual_mesh({"replica": REPLICAS})
    step = js.make_train_step(linear, optax.chain(optax.sgd(RATE), groups), mesh=mesh)
    state = step.init(START)
    return step, step(state, {key: jnp.asarray(x[0]) for key, x in BATCHES.items()})[0]


@pytest.mark.parametrize("overlap", [0, 2])
def test_weights_of_only_some_leaves_are_refused(overlap):
    uneven = js.sgp("replica", graph=STAR, overlap=overlap)
    for second in (js.local_sgd("replica"), uneven):
        step, state = step_and_state_of_groups(uneven, second)
        with pytest.raises(ValueError, match=r"holds js\.sgp for some of its leaves, or several"):
            step.consensus(state)
        with pytest.raises(ValueError, match=r"holds js\.sgp for some of its leaves, or several"):
            js.Evaluate(lambda *_: {}, mesh=step.mesh)(js.StepResult(1, state, (), {}, {}))


def test_regular_gossip_of_several_groups_has_the_plain_mean():
    step, state = step_and_state_of_groups(js.sgp("replica"), js.sgp("replica"))
    jax.tree.map(
        np.testing.assert_array_equal,
        step.consensus(state),
        js.consensus(state.params, mesh=step.mesh),
    )
