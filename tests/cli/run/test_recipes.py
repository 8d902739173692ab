"""A recipe for every algorithm, and what is built from it."""

import jax
import numpy as np
import pytest

from jaxslowmo.cli.config._algorithms import ALGORITHMS, AlgorithmConfig
from jaxslowmo.cli.config._fields import options_of, rule_of
from jaxslowmo.cli.config._training import OptimizerConfig, train_config
from jaxslowmo.cli.run._recipes import (
    RECIPES,
    build_algorithm,
    describe_exchanges,
    learning_rate_schedule,
)

# What is due in the update before a slow step, and in a slow step; periods are the defaults.
DUE = {
    "local_sgd": ((), ("average",)),
    "sgp": (("round 0",), ("round 0",)),
    "slowmo": ((), ("slow",)),
    "slowmo_sgp": (("round 0",), ("slow",)),
    "diloco": ((), ("slow",)),
}
(_, IN_16_BITS) = rule_of(options_of(AlgorithmConfig)["codec"]).goes_with


def test_there_is_a_recipe_for_every_algorithm_that_can_be_asked_for():
    assert tuple(RECIPES) == ALGORITHMS
    for recipe in RECIPES.values():
        assert (recipe.gradients is None) != (recipe.sync is None)
        assert bool(recipe.exchanges) == bool(recipe.sync)
    looks = {(recipe.colour, recipe.marker) for recipe in RECIPES.values()}
    assert len(looks) == len(ALGORITHMS)


def test_exchanges_are_told_once_and_in_one_order():
    config = train_config({"sync_every": 2, "slow_every": 4, "graph": "ring"}).algorithm
    average, slow, gossip = "average every 2", "slow step every 4", "gossip over ring"
    assert describe_exchanges(["all_reduce"], config) == []
    assert describe_exchanges(["sgp", "local_sgd"], config) == [average, gossip]
    assert describe_exchanges(["slowmo", "diloco"], config) == [average, slow]
    assert describe_exchanges(["slowmo_sgp", "local_sgd"], config) == [average, slow, gossip]


@pytest.mark.parametrize(("kind", "end"), [("cosine", 0.1), ("constant", 1.0)])
def test_schedules_warm_up_from_zero(kind, end):
    config = OptimizerConfig(learning_rate=2.0, warmup=4, schedule=kind)
    schedule = learning_rate_schedule(config, 20)
    np.testing.assert_allclose([schedule(t) for t in (0, 2, 4, 20)], [0, 1, 2, 2 * end])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_exchange_gradients_or_parameters(algorithm):
    built = build_algorithm(train_config({"algorithm": algorithm, "replicas": 2}))
    assert (built.gradients is None) != (built.sync is None)
    if built.sync is not None:
        sync = built.sync.sized({"replica": 2})
        assert (sync.phase(47), sync.phase(48)) == DUE[algorithm]


@pytest.mark.parametrize(("mib", "buckets"), [(25, 1), (0.01, 2), (0, 5)])
def test_gradients_travel_in_buckets_of_the_size_that_is_asked_for(mib, buckets, mesh_of):
    """Last leaf first: four of 4 KiB, then one of 1 MiB; the first bucket obeys as well."""
    given = {"algorithm": "all_reduce", "replicas": 2, "bucket_mib": mib}
    gradients = build_algorithm(train_config(given)).gradients
    assert gradients is not None
    tree = [np.zeros(2**18, np.float32), *[np.zeros(2**10, np.float32)] * 4]
    exchange = jax.shard_map(
        lambda g: gradients.update(jax.lax.pcast(g, "replica", to="varying"), gradients.init(g))[0],
        mesh=mesh_of({"replica": 2}),
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
    )
    assert jax.jit(exchange).lower(tree).as_text().count("stablehlo.all_reduce") == buckets


def test_gossip_is_built_as_configured():
    given = {
        "algorithm": "sgp",
        "graph": "ring",
        "peers_per_step": 2,
        "mixing": "self_weighted:0.5",
    }
    sync = build_algorithm(train_config(given)).sync
    assert sync is not None
    params = np.arange(4.0, dtype=np.float32)

    def update(p):
        return sync.update(np.zeros((), np.float32), sync.init(p), p)[0]

    moved = jax.vmap(update, axis_name="replica")(params)
    # Half of its own value, a quarter of each neighbour's on the ring.
    np.testing.assert_allclose(params + moved, [1, 1, 2, 2])


@pytest.mark.parametrize("algorithm", IN_16_BITS)
@pytest.mark.parametrize("exact", [True, False])
def test_parameters_travel_in_16_bits_where_that_is_asked_for(algorithm, exact):
    given = {"algorithm": algorithm, "replicas": 2, "codec": "float16", "exact_average": exact}
    sync = build_algorithm(train_config(given)).sync
    assert sync is not None
    sync = sync.sized({"replica": 2})
    params = np.ones((2, 3), np.float32)

    def update(p, phase):
        return sync.update(p, sync.init(p), p, phase=phase)[0]

    for phase in filter(None, sync.phases()):
        lifted = jax.vmap(lambda p, phase=phase: update(p, phase), axis_name="replica")
        assert "f16[" in str(jax.make_jaxpr(lifted)(params)), phase
