"""Conditionals whose branches exchange: agreed in type, and run once however deep they stand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxslowmo.transform._due import run_if, run_one_of


def nested(counts, x, due):
    """A mean of a mean, each where due; `counts` tells how often each branch ran as Python."""

    def mean(x):
        counts["mean"] += 1
        return jax.lax.pmean(x, "replica")

    def outer(x):
        counts["outer"] += 1
        return 2 * run_if(due, mean, lambda x: x, x)

    return run_one_of(due.astype(jnp.int32), [lambda x: x, outer], x)


@pytest.mark.parametrize("execution", ["vmap", "shard_map"])
@pytest.mark.parametrize("due", [False, True])
def test_every_branch_runs_once(execution, due, mesh_of):
    counts = {"mean": 0, "outer": 0}

    def one(x, due):
        return nested(counts, x, due)

    if execution == "vmap":
        mapped = jax.vmap(one, axis_name="replica", in_axes=(0, None))
    else:
        mapped = jax.shard_map(
            one, mesh=mesh_of({"replica": 4}), in_specs=(P("replica"), P()), out_specs=P("replica")
        )
    x = jnp.arange(4.0)
    expected = jnp.full(4, 3.0) if due else x
    assert jnp.array_equal(jax.jit(mapped)(x, jnp.array(due)), expected)
    assert counts == {"mean": 1, "outer": 1}
