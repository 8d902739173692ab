"""Counts may be integers of any library, and nothing else."""

import jax.numpy as jnp
import optax
import pytest

import jaxslowmo as js
from support.refusals import Refusal


def local(n):
    return js.local_sgd("replica", sync_every=n)


# What is made of a count, with the name of the argument.
COUNTS = {
    "sync_every": local,
    "k": lambda n: local(js.every(n)),
    "overlap": lambda n: js.sgp("replica", overlap=n),
    "num_nodes": lambda n: js.sgp("replica", graph=js.topology.ring(n)),
    "bucket_bytes": lambda n: js.local_sgd("replica", sync_every=2, bucket_bytes=n),
    "every": lambda n: js.gradients.accumulate(optax.sgd(0.1), every=n),
    "k of top_k": lambda n: js.all_reduce_gradients("replica", hook=js.hooks.top_k(k=n)),
    "top_k": lambda n: js.demo("replica", top_k=n),
    "chunk": lambda n: js.demo("replica", chunk=n),
    "block_size": lambda n: js.all_reduce_gradients("replica", hook=js.hooks.int8(block_size=n)),
    "seed of int8": lambda n: js.all_reduce_gradients(
        "replica", hook=js.hooks.int8(stochastic_rounding=True, seed=n)
    ),
    "growth_interval": lambda n: js.dynamic_loss_scale(optax.sgd(0.1), growth_interval=n),
    "capacity": lambda n: js.sparse.all_reduce_rows("replica", capacity=n),
}


@pytest.mark.parametrize("name", COUNTS)
def test_integers_of_other_libraries_count_as_those_of_python(name):
    """Also one that is an array on a device, and cannot be hashed; what is none is refused."""
    assert COUNTS[name](jnp.int32(2)) is not None
    below = [] if name.split()[0] in ("offset", "seed") else [-1]
    for value in ("1", 1.5, True, *below):
        Refusal(
            lambda value=value: COUNTS[name](value), f"`{name.split()[0]}`", repr(value)
        ).check()
