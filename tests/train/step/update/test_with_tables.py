"""Steps with tables: what is stored where, and that no gradient of a table exists.

`train/step/test_alike.py` has what they compute, `test_refused_ids.py` wrong ids.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.step.tables import DENSE, REPLICAS, batches, embeddings, step_of


@pytest.mark.parametrize(
    ("axes", "name", "mode", "limit"),
    [
        ({"replica": 8}, "local_sgd", "traced", 0.04),
        ({"replica": 4, "shard": 2}, "slowmo", "traced", 0.08),
        ({"replica": 2, "shard": 4}, "diloco", "host", 0.02),  # of a local step
    ],
)
def test_memory_of_a_step_that_decides_what_is_due(axes, name, mode, limit):
    """Tables stay where they are in local updates, and are exchanged block by block."""
    mesh, shards = js.make_mesh(axes), axes.get("shard", 1)
    made = js.embeddings(
        {"item": js.Table(shards << 18, 16)},
        axis_name="shard" if shards > 1 else None,
        optimizer=js.rowwise_sgd(0.1),
    )
    sync = {
        "local_sgd": js.local_sgd("replica", sync_every=8),
        "slowmo": js.slowmo("replica", sync_every=8, base=js.local_sgd("replica", sync_every=4)),
        "diloco": js.diloco("replica", sync_every=8),
    }[name]

    def own_loss(params, batch, *, embedded):
        return jnp.mean((embedded["item"].sum(-1) * params["w"] - batch["y"]) ** 2)

    step = js.make_train_step(
        own_loss, optax.sgd(0.3), mesh=mesh, embeddings=made, sync=sync, mode=mode
    )
    state = step.init({"w": np.float32(1)})
    batch = {"item": np.zeros(64, np.int32), "y": np.zeros(64, np.float32)}
    memory = step.compiled(state, batch).memory_analysis()
    own = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(state.params.tables))
    assert memory.alias_size_in_bytes >= own
    assert memory.temp_size_in_bytes < limit * own


def test_programs_do_not_grow_with_the_batches_of_an_update(compilations):
    """A loop knows how many batches there are to an update, and makes room for their rows."""

    mean, mesh = js.all_reduce_gradients("replica"), js.virtual_mesh({"replica": REPLICAS})
    step = step_of(1, mesh=mesh, embeddings=embeddings(axis=None), gradients=mean)
    state, counts = step.init(DENSE), []

    def given():
        for batch in batches(9):
            counts.append(compilations.count)
            yield batch

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of buffers that were donated in vain
        list(js.train_loop(step, state, given(), accumulate=5))
    assert counts[1:5] == counts[1:2] * 4  # before the second to the fifth batch
    assert counts[5:] == counts[5:6] * 4
