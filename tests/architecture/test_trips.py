"""Trips enter few files: a change that makes one longer should have a reason."""

import importlib.util
from pathlib import Path

import jax
import pytest
from jax import lax

PATH = Path(__file__).parents[2] / "tools" / "trips.py"
# In all, and without what the rest is written in.
MOST = {"slow step": (12, 9), "first call": (32, 28), "compiled step": (5, 5)}
MOST["gradient of a pipeline"] = (19, 16)
# By algorithm; slowmo is two of them, one over the other. One file of each, language/models/
# _sharding.py, lays out the GPT's matrices so that each is gathered once.
MOST["train, slowmo"] = (54, 49)
MOST["train, local_sgd"] = (52, 47)


def trips():
    spec = importlib.util.spec_from_file_location("trips", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_short(name, trip):
    most, most_above = MOST[name]
    assert len(trip.files) <= most, (name, trip.files)
    assert len(trip.above) <= most_above, (name, trip.above)


def test_a_slow_step_is_a_short_trip():
    trip = trips().slow_step()
    assert "algorithms/outer/_outer.py" in trip.files
    assert "collectives/_scatter.py" in trip.files
    assert_short("slow step", trip)


def test_calls_of_a_step_are_short_trips():
    calls = trips().calls()
    assert "algorithms/outer/_outer.py" in calls["first call"].files
    for name, trip in calls.items():
        assert_short(name, trip)


def test_a_gradient_of_a_pipeline_is_a_short_trip():
    trip = trips().pipeline()
    assert "pipeline/one_program/_scan.py" in trip.files
    assert not any(file == "pipeline/stage/_split_stage.py" for file in trip.files)
    assert_short("gradient of a pipeline", trip)


@pytest.mark.parametrize("algorithm", ["slowmo", "local_sgd"])
def test_train_is_a_short_trip_to_its_first_collective(algorithm):
    trip = trips().train(algorithm)
    assert trip.files[0] == "cli/_train.py"
    unused = ("pipeline/", "embedding/", "cli/processes/_launch.py")
    unused += ("gradients/tied/", "gradients/precision/", "gradients/sparse/")
    assert not any(file.startswith(unused) for file in trip.files), trip.files
    assert_short(f"train, {algorithm}", trip)


def test_a_trip_ends_at_the_first_collective_of_the_package():
    tools = trips()

    def not_ours(x):
        return lax.psum(x, "replica")

    from jaxslowmo.collectives import all_mean
    from jaxslowmo.tree import tree_bytes

    def run():
        jax.make_jaxpr(jax.vmap(not_ours, axis_name="replica"))(jax.numpy.ones(2))
        jax.make_jaxpr(jax.vmap(lambda x: all_mean(x, "replica"), axis_name="replica"))(
            jax.numpy.ones((2, 3))
        )
        tree_bytes([])

    whole, first = tools.follow(run), tools.follow(run, to_collective=True)
    assert "collectives/_means.py" in first.files
    assert "tree/_leaves.py" in set(whole.files) - set(first.files)
