"""Counts may be integers of any library, and nothing else."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo._support.checks import as_int
from jaxslowmo.checkpoint import Checkpoints
from support.refusals import Refusal


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3), jnp.int32(3)])
def test_integers(value):
    found = as_int(value, 3)
    assert (found, type(found)) == (3, int)
    assert as_int(value, 4) is None
    assert as_int(value) == 3


def test_other_values():
    for value in (True, np.True_, 3.0, "3", None, np.array([3]), jnp.float32(3)):
        assert as_int(value) is None
    found = []
    jax.eval_shape(lambda n: found.append(as_int(n)), jnp.int32(3))
    assert found == [None]


def program(make, n):
    """The program of four updates with what `make` makes of a count."""
    tx = optax.chain(optax.sgd(0.1), make(n))

    def run(params):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(params, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), length=4)[0][0]

    params = {"w": jnp.arange(4.0).reshape(2, 2), "m": jnp.ones((2, 40, 50))}
    # Addresses of objects differ.
    return re.sub(
        "0x[0-9a-f]+", "", str(jax.make_jaxpr(jax.vmap(run, axis_name="replica"))(params))
    )


def local(n):
    return js.local_sgd("replica", sync_every=n)


# What is made of a count, with the name of the argument.
COUNTS = {
    "sync_every": local,
    "k": lambda n: local(js.every(n)),
    "start": lambda n: local(js.every(2, start=n)),
    "offset": lambda n: local(js.every(3, offset=n)),
    "sync_every of diloco": lambda n: js.diloco("replica", sync_every=n),
    "sync_every of a group": lambda n: js.hierarchical_local_sgd({"replica": n}),
    "overlap": lambda n: js.sgp("replica", overlap=n),
    "num_nodes": lambda n: js.sgp("replica", graph=js.topology.ring(n)),
    "bucket_bytes": lambda n: js.local_sgd("replica", sync_every=2, bucket_bytes=n),
    "every": lambda n: js.gradients.accumulate(optax.sgd(0.1), every=n),
    "bucket_bytes of gradients": lambda n: js.all_reduce_gradients("replica", bucket_bytes=n),
    "first_bucket_bytes": lambda n: js.all_reduce_gradients("replica", first_bucket_bytes=n),
    "alone_bytes": lambda n: js.all_reduce_gradients("replica", alone_bytes=n),
    "max_buckets": lambda n: js.all_reduce_gradients("replica", max_buckets=n),
    "k of top_k": lambda n: js.all_reduce_gradients("replica", hook=js.hooks.top_k(k=n)),
    "top_k": lambda n: js.demo("replica", top_k=n),
    "chunk": lambda n: js.demo("replica", chunk=n),
    "block_size": lambda n: js.all_reduce_gradients("replica", hook=js.hooks.int8(block_size=n)),
    "start_step": lambda n: js.all_reduce_gradients(
        "replica", hook=js.hooks.powersgd(start_step=n)
    ),
    "rank": lambda n: js.all_reduce_gradients(
        "replica", hook=js.hooks.powersgd(rank=n, start_step=2)
    ),
    "seed of powersgd": lambda n: js.all_reduce_gradients(
        "replica", hook=js.hooks.powersgd(start_step=2, seed=n)
    ),
    "seed of int8": lambda n: js.all_reduce_gradients(
        "replica", hook=js.hooks.int8(stochastic_rounding=True, seed=n)
    ),
    "growth_interval": lambda n: js.dynamic_loss_scale(optax.sgd(0.1), growth_interval=n),
    "capacity": lambda n: js.sparse.all_reduce_rows("replica", capacity=n),
}


@pytest.mark.parametrize("name", COUNTS)
def test_integers_of_other_libraries_count_as_those_of_python(name):
    """Also one that is an array on a device, and cannot be hashed; what is none is refused."""
    n = 2 if name in ("num_nodes", "overlap") else 100
    assert program(COUNTS[name], jnp.int32(n)) == program(COUNTS[name], n)
    below = [] if name.split()[0] in ("offset", "seed") else [-1]
    for value in ("1", 1.5, True, *below):
        Refusal(
            lambda value=value: COUNTS[name](value), f"`{name.split()[0]}`", repr(value)
        ).check()


def test_tables_steps_meshes_and_checkpoints_take_them(tmp_path):
    two = np.array(2)
    tables = {"items": js.Table(num_rows=np.int8(100), dim=two)}
    options = {"axis_name": None, "optimizer": js.rowwise_sgd(0.1)}
    tables = js.embeddings(tables, capacity={"items": two}, **options)
    items = tables.tables["items"]
    assert (items.num_rows, items.dim) == (100, 2)
    assert js.embedding.bags([[1], [2, 3]], max_length=two).ids.shape == (2, 2)
    mesh = js.virtual_mesh({"replica": two})
    assert mesh == js.virtual_mesh({"replica": 2})
    assert js.make_mesh({"replica": two}) == js.make_mesh({"replica": 2})
    step = js.make_train_step(
        lambda params, batch: jnp.mean((params["w"][None] - batch) ** 2),
        js.dynamic_loss_scale(optax.sgd(0.1), growth_interval=two, hysteresis=two),
        sync=local(two),
        mesh=mesh,
        accumulate=two,
    )
    state = step.init({"w": np.ones(3, np.float32)})
    with Checkpoints(tmp_path, keep=two) as checkpoints:
        checkpoints.save(np.int8(0), state, wait=True)
        assert checkpoints.restore(step, {"w": np.ones(3)}, step=jnp.int32(0)).step == 0
    assert js.reports.measured(step, rate=two)
