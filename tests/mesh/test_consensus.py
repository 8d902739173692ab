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
from jaxslowmo.checkpoint._convert import consensus as host_consensus
from jaxslowmo.mesh._in_sync import _consensus_fn

REPLICAS, RATE, STEPS = 4, 0.25, 7
STAR = js.topology.star(REPLICAS)
SYNCS = {
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
def trained(name, place="sync"):
    """A step whose replicas count differently, and its state after training."""
    mesh, sgd = js.virtual_mesh({"replica": REPLICAS}), optax.sgd(RATE)
    options = {"optimizer": optax.chain(sgd, SYNCS[name])}
    if place == "sync":
        options = {"optimizer": sgd, "sync": SYNCS[name]}
    step = js.make_train_step(linear, mesh=mesh, **options)
    state = step.init(START)
    for t in range(STEPS):
        state, _ = step(state, {key: jnp.asarray(x[t]) for key, x in BATCHES.items()})
    return step, state


def params_and_shares(name):
    """The parameters of trained replicas and their shares as NumPy arrays."""
    step, state = trained(name)
    return jax.tree.map(np.asarray, (state.params, step.sync.shares(state.exchange)))


@pytest.mark.parametrize(
    ("name", "place"), [*((name, "sync") for name in SYNCS), ("star, overlap", "optimizer")]
)
def test_gossip_has_the_weighted_mean_of_replicas_and_values_in_flight(name, place):
    step, state = trained(name, place)
    one = step.consensus(state)
    np.testing.assert_allclose(one["w"], EXACT, rtol=1e-5)
    assert np.abs(np.asarray(state.params["w"]).mean(0) - EXACT).max() > 0.01  # the plain mean
    evaluate = js.train.Evaluate(lambda params, _: {"w": params["w"]}, mesh=step.mesh)
    result = js.train.StepResult(STEPS, state, (), {}, {})
    np.testing.assert_array_equal(evaluate(result)["w"], one["w"])
    with pytest.raises(ValueError, match="`state`"):
        step.consensus(state.params)
    if place == "sync":
        params, shares = params_and_shares(name)
        again = js.consensus(params, mesh=step.mesh, shares=shares)
        jax.tree.map(np.testing.assert_array_equal, again, one)
        # A run that is resumed on another number of replicas starts from the same.
        again = host_consensus(params, shares, REPLICAS)
        np.testing.assert_allclose(one["w"], again["w"], rtol=1e-6)
        assert one["h"].dtype == again["h"].dtype == jnp.bfloat16
        halves = (np.asarray(x["h"], np.float64) for x in (one, again))
        np.testing.assert_allclose(*map(np.ravel, halves), rtol=2.0**-8)


def test_large_weights_and_small_leaves_keep_their_digits():
    """The total weight, 257, is not representable in bfloat16."""
    params = {"h": np.array([[1], [2]], jnp.bfloat16), "w": np.array([[1], [2]], np.float32)}
    shares = [(np.array([256, 1], np.float32), None)]
    one = js.consensus(params, mesh=js.virtual_mesh({"replica": 2}), shares=shares)
    np.testing.assert_allclose(one["w"], [258 / 257], rtol=1e-7)
    assert float(one["h"][0]) == 1.0


@pytest.mark.parametrize("replicas", [1, 2])
def test_leaves_that_are_sharded_inside_a_replica_stay_sharded(replicas, mesh_of):
    mesh = mesh_of({"replica": replicas, "fsdp": 4})
    x = np.arange(8 * replicas, dtype=np.float32).reshape(replicas, 8)
    placed = {"w": jax.device_put(x, NamedSharding(mesh, P("replica", "fsdp")))}
    weights = np.float32([1, 3])[:replicas]
    for shares in (None, [(weights, None), (weights, placed)]):
        one = js.consensus(placed, mesh=mesh, shares=shares)
        assert one["w"].sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp")), 1)
        mean = x.mean(0) if shares is None else weights @ x / weights.sum()
        assert np.array_equal(one["w"], mean)


def test_it_sends_one_all_reduce_per_leaf_and_one_for_the_weights(mesh_of):
    params, shares = params_and_shares("star, overlap")
    weights, values = zip(*shares, strict=True)
    fn = _consensus_fn(mesh_of({"replica": REPLICAS}), "replica", frozenset())
    report = js.comm_report_of(fn.lower(weights, (params, *values[1:])), compile=False)
    assert report.count(axis="replica", collective="all-reduce") == report.count() == 3
    assert report.bytes() == 4 * 6 + 4 * 2 + 4  # float32 of all leaves and of the total weight
