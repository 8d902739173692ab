"""A recipe for every algorithm, what is built from it, and which options it looks at."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.cli.config._options import options_of
from jaxslowmo.cli.config._training import (
    ALGORITHMS,
    GOES_WITH,
    AlgorithmOptions,
    OptimizerOptions,
    train_config,
)
from jaxslowmo.cli.run._recipes import (
    RECIPES,
    RecipeInputs,
    build_algorithm,
    learning_rate_schedule,
    scaled,
)

# What is due in the update before a slow step, and in a slow step; periods are the defaults.
DUE = {
    "local_sgd": ((), ("average",)),
    "sgp": (("round 0",), ("round 0",)),
    "slowmo": ((), ("slow",)),
    "slowmo_sgp": (("round 0",), ("slow",)),
    "diloco": ((), ("slow",)),
}
# The algorithms that use an option.
USERS = {
    option: algorithms
    for options, other, algorithms in GOES_WITH
    for option in options.split()
    if other == "algorithm" and option in options_of(AlgorithmOptions)
}


def test_there_is_a_recipe_for_every_algorithm_that_can_be_asked_for():
    assert tuple(RECIPES) == ALGORITHMS
    for algorithm, recipe in RECIPES.items():
        assert (recipe.gradients is None) != (recipe.sync is None)
        assert bool(recipe.exchanges) == bool(recipe.sync)
        built = build_algorithm(train_config({"algorithm": algorithm, "replicas": 2}))
        assert (built.gradients is None) == (recipe.gradients is None)
        if built.sync is not None:
            sync = built.sync.bound({"replica": 2})
            assert (sync.phase(47), sync.phase(48)) == DUE[algorithm]
    looks = {(recipe.colour, recipe.marker) for recipe in RECIPES.values()}
    assert len(looks) == len(ALGORITHMS)


@pytest.mark.parametrize(("kind", "end"), [("cosine", 0.1), ("constant", 1.0)])
def test_schedules_warm_up_from_zero(kind, end):
    config = OptimizerOptions(learning_rate=2.0, warmup=4, schedule=kind)
    schedule = learning_rate_schedule(config, 20)
    middle = 2 * (end + (1 - end) / 2)
    found = [schedule(t) for t in (0, 2, 4, 12, 20, 30)]
    np.testing.assert_allclose(found, [0, 1, 2, middle, 2 * end, 2 * end])
    at_once = OptimizerOptions(learning_rate=2.0, warmup=0, schedule=kind)
    assert float(learning_rate_schedule(at_once, 20)(0)) == 2.0


@pytest.mark.parametrize(("mib", "buckets"), [(25, 1), (0.01, 2), (0, 5)])
def test_gradients_travel_in_buckets_of_the_size_that_is_asked_for(mib, buckets, mesh_of):
    """Last leaf first: four of 4 KiB, then one of 1 MiB; the first bucket obeys as well."""
    given = {"algorithm": "all_reduce", "replicas": 2, "bucket_mib": mib}
    gradients = build_algorithm(train_config(given)).gradients
    tree = [np.zeros(2**18, np.float32), *[np.zeros(2**10, np.float32)] * 4]
    exchange = jax.shard_map(
        lambda g: gradients.update(jax.lax.pcast(g, "replica", to="varying"), gradients.init(g))[0],
        mesh=mesh_of({"replica": 2}),
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
    )
    assert jax.jit(exchange).lower(tree).as_text().count("stablehlo.all_reduce") == buckets


def test_gossip_is_built_as_configured():
    given = {"algorithm": "sgp", "graph": "ring", "peers_per_step": 2}
    sync = build_algorithm(train_config(given | {"mixing": "self_weighted:0.5"})).sync
    params = np.arange(4.0, dtype=np.float32)

    def update(p):
        return sync.update(np.zeros((), np.float32), sync.init(p), p)[0]

    moved = jax.vmap(update, axis_name="replica")(params)
    # Half of its own value, a quarter of each neighbour's on the ring.
    np.testing.assert_allclose(params + moved, [1, 1, 2, 2])


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4", "top_k:0.1"])
def test_few_bits_with_a_sharded_anchor(codec):
    for algorithm in ("local_sgd", "slowmo", "diloco"):
        sync = build_algorithm(train_config({"algorithm": algorithm, "codec": codec})).sync
        exchange = sync.algorithm.groups[-1]
        assert exchange.codec.error_feedback
        assert codec.partition(":")[0] in repr(exchange.codec)


@pytest.mark.parametrize("algorithm", USERS["codec"])
def test_parameters_travel_in_16_bits_where_that_is_asked_for(algorithm):
    given = {"algorithm": algorithm, "replicas": 2, "codec": "float16", "exact_average": False}
    sync = build_algorithm(train_config(given)).sync.bound({"replica": 2})
    params = np.ones((2, 4), np.float32)

    def update(p, phase):
        return sync.update(p, sync.init(p), p, phase=phase)[0]

    for phase in filter(None, sync.phases()):
        lifted = jax.vmap(lambda p, phase=phase: update(p, phase), axis_name="replica")
        assert "f16[" in str(jax.make_jaxpr(lifted)(params)), phase


class Watched:
    """A configuration that notes which of its options are looked at."""

    def __init__(self, config):
        self.config, self.seen = config, set()

    def __getattr__(self, name):
        self.seen.add(name)
        return getattr(self.config, name)


def looked_at(algorithm, **values):
    """The options that building and tracing the transforms of an algorithm looks at."""
    config = Watched(AlgorithmOptions(algorithm=algorithm, **values))
    setting = RecipeInputs(config, optax.constant_schedule(0.1), two_levels=False)
    recipe = RECIPES[algorithm]
    made = (recipe.gradients or recipe.sync)(setting)

    def step(params):
        return made.update(params, made.init(params), params)

    # The graph is made when the number of replicas is known.
    jax.eval_shape(jax.vmap(step, axis_name="replica"), {"w": jnp.ones((2, 3))})
    return config.seen


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_options_of_an_algorithm_are_those_that_its_recipe_looks_at(algorithm):
    # The state is sharded only with exact averages.
    seen = looked_at(algorithm) | looked_at(algorithm, exact_average=False)
    assert options_of(AlgorithmOptions).keys() == {"algorithm", *USERS}
    assert seen == {option for option, users in USERS.items() if algorithm in users}


def test_only_float16_has_a_scale_and_not_if_it_is_0():
    def scale(**given):
        return js.loss_scale_of(
            scaled(optax.sgd(0.1), train_config(given)).init({"w": jnp.zeros(1)})
        )

    assert scale(dtype="bfloat16") is scale(dtype="float16", loss_scale=0) is None
    assert scale(dtype="float16", loss_scale=128.0) == 128
