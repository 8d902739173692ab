"""Options without an effect beside the others are refused, and only those."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxslowmo.cli.config._algorithms import ALGORITHMS, AlgorithmConfig
from jaxslowmo.cli.config._commands import CompareConfig
from jaxslowmo.cli.config._fields import options_of, rule_of
from jaxslowmo.cli.config._options import refuse_unused
from jaxslowmo.cli.config._training import train_config
from jaxslowmo.cli.run._recipes import RECIPES, RecipeInputs


class Watched:
    """A configuration that notes which of its options are looked at."""

    def __init__(self, config):
        self.config, self.seen = config, set()

    def __getattr__(self, name):
        self.seen.add(name)
        return getattr(self.config, name)


def looked_at(algorithm, **values):
    """The options that building and tracing the transforms of an algorithm looks at."""
    config = Watched(AlgorithmConfig(algorithm=algorithm, **values))
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
    goes_with = {
        name: rule_of(field).goes_with[1]
        for name, field in options_of(AlgorithmConfig).items()
        if rule_of(field).goes_with
    }
    assert seen == {name for name, algorithms in goes_with.items() if algorithm in algorithms}
    assert set(goes_with) == set(options_of(AlgorithmConfig)) - {"algorithm"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"graph": "ring"}, "--graph goes with --algorithm sgp or slowmo_sgp, not with slowmo;"),
        (
            {"nesterov": False, "algorithm": "local_sgd"},
            "^--no-nesterov goes with --algorithm slowmo or slowmo_sgp, not with local_sgd$",
        ),
        (
            {"nesterov": True, "algorithm": "local_sgd"},
            "^--nesterov goes with --algorithm slowmo or slowmo_sgp, not with local_sgd$",
        ),
        ({"weight_decay": 0.1, "optimizer": "sgd"}, "--weight-decay goes with --optimizer adamw"),
        (
            {"schedule_steps": 9, "schedule": "constant"},
            "--schedule-steps goes with --rate-schedule",
        ),
        ({"statistics_rate": 9}, "--statistics-rate goes with --statistics, which was not given;"),
        ({"max_rollbacks": 1}, "--max-rollbacks goes with --on-nan rollback, not with stop; got 1"),
        ({"on_nan": "rollback"}, "--on-nan rollback needs --checkpoint-every"),
        (
            {"shard_state": True, "exact_average": False},
            "--shard-state does not go with --no-exact-average",
        ),
        (
            {"shard_state": True, "codec": "float16"},
            "--shard-state does not go with --codec float16, which needs a whole anchor",
        ),
    ],
)
def test_what_nothing_looks_at_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        refuse_unused(given, train_config(given))


def test_what_a_preset_brings_is_not_refused():
    given = {"preset": "demo", "algorithm": "local_sgd"}  # with a slow momentum
    refuse_unused(given, train_config(given))
    refuse_unused({"on_nan": "rollback", "resume": True}, train_config({"resume": True}))
    refuse_unused({"shard_state": False, "exact_average": False}, train_config({}))


def test_a_comparison_takes_what_one_of_its_algorithms_uses():
    given = {"graph": "ring", "bucket_mib": 1.0}
    refuse_unused(given, train_config(given), ["all_reduce", "sgp"])
    with pytest.raises(ValueError, match="not with all_reduce, local_sgd; got ring"):
        refuse_unused(given, train_config(given), ["local_sgd", "all_reduce"])
    with pytest.raises(
        ValueError, match=r"--algorithms local_sgd\+overlap=1: overlap goes with --algorithm sgp or"
    ):
        CompareConfig(train_config({}), algorithms=("local_sgd+overlap=1",))
