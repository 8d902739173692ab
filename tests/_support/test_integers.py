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


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3), jnp.int32(3)])
def test_integers(value):
    found = as_int(value, 1)
    assert (found, type(found)) == (3, int)
    assert as_int(value, 4) is None


@pytest.mark.parametrize("value", [True, np.True_, 3.0, "3", None, np.array([3]), jnp.float32(3)])
def test_other_values(value):
    assert as_int(value) is None


def test_a_traced_value_is_no_count():
    found = []
    jax.eval_shape(lambda n: found.append(as_int(n)), jnp.int32(3))
    assert found == [None]


# What is made of integers of other libraries is what is made of the int: of the narrowest, of one
# that cannot be hashed, and of one that is an array on a device.
KINDS = [np.int64, np.int8, np.array, jnp.int32]


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
    "every": lambda n: js.accumulate(optax.sgd(0.1), every=n),
    "bucket_bytes of gradients": lambda n: js.all_reduce_gradients("replica", bucket_bytes=n),
    "first_bucket_bytes": lambda n: js.all_reduce_gradients("replica", first_bucket_bytes=n),
    "alone_bytes": lambda n: js.all_reduce_gradients("replica", alone_bytes=n),
    "max_buckets": lambda n: js.all_reduce_gradients("replica", max_buckets=n),
    "k of top_k": lambda n: js.all_reduce_gradients("replica", hook=js.hooks.top_k(k=n)),
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
    "capacity": lambda n: js.all_reduce_rows("replica", capacity=n),
}


@pytest.mark.parametrize("name", COUNTS)
def test_integers_of_other_libraries_count_as_those_of_python(name):
    n = 2 if name in ("num_nodes", "overlap") else 100
    wanted = program(COUNTS[name], n)
    for kind in KINDS:
        assert program(COUNTS[name], kind(n)) == wanted, kind


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_no_count_is_refused_by_name(name):
    values = [
        "1",
        1.5,
        True,
        np.float32(2),
        *([] if name.split()[0] in ("offset", "seed") else [-1]),
    ]
    for value in values:
        with pytest.raises(ValueError, match=f"`{name.split()[0]}`.* must ") as caught:
            COUNTS[name](value)
        assert repr(value) in str(caught.value)


def test_limits_of_buckets_are_counts():
    leaves = [np.zeros(400, np.float32)] * 3
    wanted = (
        js.assign_buckets(leaves, (100,), max_buckets=2),
        js.assign_buckets(leaves, (100,), alone_bytes=100),
    )
    for kind in KINDS:
        n, two = kind(100), kind(2)
        found = (
            js.assign_buckets(leaves, (n,), max_buckets=two),
            js.assign_buckets(leaves, (n,), alone_bytes=n),
        )
        assert found == wanted
        assert {type(x) for _, limits in found for x in limits} == {int}
    for wrong in ("1", 1.5, -1):
        with pytest.raises(ValueError, match="`limits` are sizes in bytes and must be ints >= 0"):
            js.assign_buckets(leaves, (16, wrong))
        with pytest.raises(ValueError, match="`alone_bytes` is a size in bytes and must be an int"):
            js.assign_buckets(leaves, alone_bytes=wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_counts(kind):
    dense = jnp.ones((200, 1))
    rows = js.row_gradient(dense, capacity=kind(100)).gradient
    assert rows.rows.shape == (100,)
    assert js.coalesce(rows, capacity=kind(100)).gradient.rows.shape == (100,)
    assert js.gather_rows(dense, np.arange(3), capacity=kind(100))[0].rows.shape == (100,)
    for capacity in (kind(100), {"table": kind(100)}):
        tx = js.all_reduce_rows("replica", tables=("table",), capacity=capacity)
        found = jax.eval_shape(
            jax.vmap(
                lambda g, tx=tx: tx.update({"table": g}, tx.init({"table": dense}))[0],
                axis_name="replica",
                in_axes=None,
                axis_size=2,
            ),
            rows,
        )
        assert found["table"].shape == (2, 200, 1)
        _, grads = js.row_value_and_grad(
            lambda params, i: jnp.sum(params["table"][i]),
            lambda i: {"table": i},
            capacity=capacity,
        )({"table": dense}, jnp.arange(3))
        assert grads["table"].rows.shape == (100,)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_meshes_tables_and_checkpoints_take_them(tmp_path, kind):
    two = kind(2)
    mesh = js.virtual_mesh({"replica": two})
    assert mesh == js.virtual_mesh({"replica": 2})
    assert js.make_mesh({"replica": two}) == js.make_mesh({"replica": 2})
    step = js.make_train_step(
        lambda params, batch: jnp.mean((params["w"] - batch) ** 2),
        js.dynamic_loss_scale(optax.sgd(0.1), growth_interval=two, hysteresis=two),
        sync=local(two),
        mesh=mesh,
        accumulate=kind(100),
    )
    state = step.init({"w": np.ones(3, np.float32)})
    state, _ = step(state, np.ones((400, 3), np.float32))  # 200 examples of a replica
    with Checkpoints(tmp_path, keep=two) as checkpoints:
        checkpoints.save(kind(100), state, wait=True)
        assert checkpoints.restore(step, {"w": np.ones(3)}, step=kind(100)).step == 100
    assert js.measured(step, rate=two)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_of_tables_are_counts(kind):
    def made(hundred, one):
        tables = {"items": js.Table(num_rows=hundred, dim=one)}
        return js.embeddings(
            tables,
            axis_name=None,
            optimizer=js.rowwise_sgd(0.1),
            capacity={"items": hundred},
        )

    found, wanted = made(kind(100), kind(4)), made(100, 4)
    assert found.layout() == wanted.layout()
    assert found.tables == wanted.tables
    assert {type(found.tables["items"].num_rows), type(found.tables["items"].dim)} == {int}
    ids = np.arange(6).reshape(6, 1)
    assert found.slots_needed({"items": ids}, num_parts=kind(2)) == {"items": 3}
    assert js.bags([[1], [2, 3]], max_length=kind(4)).ids.shape == (2, 4)
