"""Runs with embedding tables: saved, and resumed on other numbers of replicas and devices."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from checkpoint.runs import on_host
from jaxslowmo.checkpoint import CheckpointError, Checkpoints, export_consensus, load_consensus
from train.step.tables import DENSE, OWN, batches, embeddings, loss

pytestmark = pytest.mark.xdist_group("saved tables")  # they share a run

BATCHES = batches(6)
SAVED = 3  # updates, one behind an exchange


def make(replicas, shards):
    devices = np.array(jax.devices()[: replicas * shards]).reshape(replicas, shards)
    mesh = jax.sharding.Mesh(devices, ("replica", "shard"))
    base = js.local_sgd("replica", sync_every=2)
    sync = js.slowmo("replica", base=base, sync_every=4)
    rows = js.rowwise_adam(0.1, per_row=True)
    made = embeddings(own={"item": OWN["item"]}, optimizer=rows)  # momentum of items, Adam of users
    options = {"embeddings": made, "sync": sync}
    return js.make_train_step(loss, optax.adam(0.1), mesh=mesh, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was saved between two exchanges: step, folder, state then and in the end."""
    folder, step = tmp_path_factory.mktemp("tables") / "run", make(2, 2)
    state, then = step.init(DENSE), None
    with Checkpoints(folder) as checkpoints:
        for t, batch in enumerate(BATCHES, 1):
            state, _ = step(state, batch)
            if t == SAVED:
                checkpoints.save(SAVED, state)
                then = on_host(state)
    return step, folder, then, on_host(state)


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_resumed_run_ends_with_the_same_bits(run):
    step, folder, then, end = run
    found = Checkpoints(folder).restore(step, DENSE)
    assert found.is_exact
    same(on_host(found.state), then)
    state = found.state
    for batch in BATCHES[SAVED:]:
        state, _ = step(state, batch)
    same(on_host(state), end)


def test_on_another_number_of_devices_rows_are_the_same(run):
    _, folder, then, _ = run
    state = Checkpoints(folder).restore(make(2, 1), DENSE).state
    same(on_host(state).params, then.params)
    same(on_host(state).opt_state, then.opt_state)


def test_on_another_number_of_replicas_and_exported_they_are_the_mean(run, tmp_path):
    step, folder, then, _ = run
    found = Checkpoints(folder).restore(make(1, 2), DENSE)
    assert not found.is_exact
    both = then.params, then.opt_state.tables.accumulators
    mean = jax.tree.map(lambda x: np.mean(x, axis=0, keepdims=True), both)
    both = found.state.params, found.state.opt_state.tables.accumulators
    jax.tree.map(lambda x, m: np.testing.assert_allclose(x, m, rtol=1e-6, atol=1e-9), both, mean)

    state = Checkpoints(folder).restore(step, DENSE).state
    export_consensus(tmp_path / "model", state.params, mesh=step.mesh)
    one = jax.tree.map(lambda x: x[0], state.params)
    tables = step.embeddings.read(load_consensus(tmp_path / "model", like=one).tables)
    # For other programs in the order of ids.
    made = {"mesh": step.mesh, "embeddings": step.embeddings}
    export_consensus(tmp_path / "model", state.params, **made)
    exported = load_consensus(tmp_path / "model")
    for name, shape in (("item", (40, 4)), ("user", (24, 4))):
        np.testing.assert_array_equal(exported[f"tables/{name}"], tables[name])
        assert tables[name].shape == shape


def test_tables_of_other_rows_are_refused_though_their_padded_arrays_have_one_shape(tmp_path):
    def step(rows):
        tables = {"item": js.Table(rows, 4), "user": js.Table(9, 4)}
        made = js.embeddings(tables, axis_name="shard", optimizer=js.rowwise_sgd(0.1))
        mesh = js.make_mesh({"replica": 2, "shard": 2}, devices=jax.devices()[:4])
        options = {"embeddings": made, "sync": js.local_sgd("replica")}
        return js.make_train_step(loss, optax.sgd(0.1), mesh=mesh, **options)

    saved, other = step(10), step(12)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, saved.init(DENSE), wait=True, embeddings=saved.embeddings)
        assert checkpoints.restore(saved, DENSE).is_exact
        with pytest.raises(CheckpointError, match=r"'item': 10, .*'item': 12, "):
            checkpoints.restore(other, DENSE)
