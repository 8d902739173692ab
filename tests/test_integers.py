"""Counts may be integers of any library, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo._integers import as_int
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


def trained(make, n):
    """Parameters after four updates with what `make` makes of a count of 2."""
    tx = optax.chain(optax.sgd(0.1), make(n))
    params = {"w": jnp.arange(4.0).reshape(2, 2)}

    def run(params):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(params, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), length=4)[0][0]

    return jax.vmap(run, axis_name="replica")(params)


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
    "growth_interval": lambda n: js.dynamic_loss_scale(optax.sgd(0.1), growth_interval=n),
    "capacity": lambda n: js.all_reduce_rows("replica", capacity=n),
}


@pytest.mark.parametrize("name", COUNTS)
def test_numpy_integers_count_as_those_of_python(name):
    found, wanted = (trained(COUNTS[name], n)["w"] for n in (np.int64(2), 2))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_no_count_is_refused_by_name(name):
    values = ["1", 1.5, True, np.float32(2), *([] if name == "offset" else [-1])]
    for value in values:
        with pytest.raises(ValueError, match=f"`{name.split()[0]}`.* must ") as caught:
            COUNTS[name](value)
        assert repr(value) in str(caught.value)


def test_limits_of_buckets_are_counts():
    leaves = [np.zeros(4, np.float32)] * 3
    assert js.assign_buckets(leaves, (np.int64(16),)) == js.assign_buckets(leaves, (16,))
    for wrong in ("1", 1.5, -1):
        with pytest.raises(ValueError, match="`limits` are sizes in bytes and must be ints >= 0"):
            js.assign_buckets(leaves, (16, wrong))


def test_steps_meshes_tables_and_checkpoints_take_them(tmp_path):
    two = np.int64(2)
    mesh = js.virtual_mesh({"replica": two})
    step = js.make_train_step(
        lambda params, batch: jnp.mean((params["w"] - batch) ** 2),
        optax.sgd(0.1),
        sync=local(two),
        mesh=mesh,
        accumulate=two,
    )
    state, _ = step(step.init({"w": np.ones(3, np.float32)}), np.ones((4, 3), np.float32))
    js.TrainPipeline(step, state, [], depth=two, accumulate=two).close()
    with Checkpoints(tmp_path, keep=two) as checkpoints:
        checkpoints.save(two, state)
    assert list(tmp_path.glob("2"))
    assert js.Table(num_rows=two, dim=two).num_rows == 2
