"""A slow step enters few files: a change that makes the trip longer should have a reason."""

import importlib.util
from pathlib import Path

import jax
from jax import lax

PATH = Path(__file__).parents[2] / "tools" / "trips.py"
MOST, MOST_ABOVE = 13, 9  # in all, and without what the rest is written in


def trips():
    spec = importlib.util.spec_from_file_location("trips", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_slow_step_is_a_short_trip():
    trip = trips().slow_step()
    assert "algorithms/outer/_step.py" in trip.files
    assert "collectives/_scatter.py" in trip.files
    assert len(trip.files) <= MOST, trip.files
    assert len(trip.above) <= MOST_ABOVE, trip.above


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
    assert "collectives/_reduce.py" in first.files
    assert "tree/_leaves.py" in set(whole.files) - set(first.files)
