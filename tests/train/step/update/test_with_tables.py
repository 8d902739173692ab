"""Steps with tables: those of a model whose tables are ordinary parameters."""

import itertools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxslowmo as js
from support.exhaustive import sweep
from train.step.tables import (
    DENSE,
    REPLICAS,
    SIZES,
    batches,
    embeddings,
    loss,
    step_of,
    twin,
    whole,
)

BATCHES = batches(5)
PLAIN = (None,) * 5
WEIGHTS = [[1.0, 1.0], [2.0, 1.0], [0.0, 3.0], [0.0, 0.0], [1.0, 1.0]]
local = js.local_sgd("replica", sync_every=2)
late = js.every(2, start=3)
WAYS = {
    "gradients": lambda: {"gradients": js.all_reduce_gradients("replica")},
    "post_local": lambda: {
        "gradients": js.post_local_gradients(late, js.all_reduce_gradients("replica")),
        "sync": js.local_sgd("replica", sync_every=late),
    },
    "local_sgd": lambda: {"sync": local},
    "slowmo": lambda: {"sync": js.slowmo("replica", base=local, sync_every=4)},
    "slowmo_whole": lambda: {
        "sync": js.slowmo("replica", base=local, sync_every=4, shard_state=False)
    },
    "sgp": lambda: {"sync": js.sgp("replica")},
    "diloco": lambda: {"sync": js.diloco("replica", sync_every=2)},
    "apart": lambda: {"sync": "none"},
}
USUAL = {
    ("row", 2, "slowmo", "traced"),
    ("column", 2, "local_sgd", "traced"),
    ("table", 2, "gradients", "traced"),
}


def run(step, state, weights=PLAIN):
    values = []
    for batch, weight in zip(BATCHES, weights, strict=True):
        state, metrics = step(state, batch, weight)
        values.append(np.asarray(metrics["loss"]))
    return state, values


def compare(step, weights=PLAIN, **options):
    state = step.init(DENSE)
    other, expected = twin({name: x[0] for name, x in whole(step, state).items()}, **options)
    state, values = run(step, state, weights)
    expected, wanted = run(other, expected, weights)
    np.testing.assert_allclose(values, wanted, rtol=2e-5, atol=1e-6)
    found = {**state.params.dense, **whole(step, state)}
    for name, x in expected.params.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("shard", "shards", "way", "mode"),
    sweep(
        itertools.product(["row", "column", "table"], [1, 2, 4], WAYS, ["traced", "host"]),
        lambda *case: case in USUAL,
    ),
)
def test_steps_are_those_of_dense_tables(shard, shards, way, mode):
    compare(step_of(shards, shard=shard, mode=mode, **WAYS[way]()), mode=mode, **WAYS[way]())


ACTIVE = {"gradients": js.all_reduce_gradients("replica", divide_by="active")}


@pytest.mark.parametrize(
    "way", sweep(["gradients", "active", "local_sgd", "apart"], "local_sgd".__eq__)
)
def test_replicas_of_weight_zero_leave_their_tables(way):
    options = ACTIVE if way == "active" else WAYS[way]()
    compare(step_of(2, **options), WEIGHTS, **options)


@pytest.mark.parametrize(
    "kinds", sweep([AxisType.Auto, AxisType.Explicit], lambda k: k != AxisType.Auto)
)
def test_microbatches_and_types_of_axes(kinds):
    compare(step_of(2, kinds=kinds, accumulate=4, sync=local), accumulate=4, sync=local)


def test_without_an_axis_on_virtual_replicas():
    mesh = js.virtual_mesh({"replica": REPLICAS})
    made = embeddings(axis=None)
    compare(step_of(1, mesh=mesh, embeddings=made, sync=local), sync=local)


@pytest.mark.exhaustive
def test_windows_of_batches():
    step, options = step_of(2, sync=local), {"sync": local}
    state = step.init(DENSE)
    other, expected = twin({name: x[0] for name, x in whole(step, state).items()}, **options)
    for one in (0, 2):
        window, _ = step.collect(state, BATCHES[one])
        twin_window, _ = other.collect(expected, BATCHES[one])
        if one:
            window, _ = step.collect(state, BATCHES[4], window=window)
            twin_window, _ = other.collect(expected, BATCHES[4], window=twin_window)
        state, metrics = step(state, BATCHES[one + 1], window=window)
        expected, wanted = other(expected, BATCHES[one + 1], window=twin_window)
        np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=2e-5)
    for name, x in whole(step, state).items():
        np.testing.assert_allclose(x, expected.params[name], rtol=1e-4, atol=2e-6)


def test_no_gradient_of_a_table_exists():
    """Of 8 MB of tables on a device a host-scheduled local step changes rows where they stand."""
    table = js.Table(1 << 19, 16, pooling="mean")
    made = js.embeddings({"item": table}, axis_name="shard", optimizer=js.rowwise_adagrad(0.1))

    def own_loss(params, batch, *, embedded):
        found = {"item": embedded["item"][:, :4], "user": embedded["item"][:, 4:8]}
        return loss(params, batch, embedded=found)

    mesh = js.make_mesh({"replica": 2, "shard": 4})
    step = js.make_train_step(
        own_loss, optax.sgd(0.3), mesh=mesh, embeddings=made, sync=local, mode="host"
    )
    state = step.init(DENSE)
    memory = step.compiled(state, BATCHES[0]).memory_analysis()
    own = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(state.params.tables))
    assert own == (1 << 19) // 4 * 16 * 4
    assert memory.alias_size_in_bytes >= own
    assert memory.temp_size_in_bytes < own / 50


def test_ids_outside_of_a_table_are_refused():
    """Those of the host before the step, by name; others at the second call after it."""
    mesh = js.virtual_mesh({"replica": REPLICAS})
    step = step_of(1, mesh=mesh, embeddings=embeddings(axis=None), sync=local)
    state = step.init(DENSE)
    wrong = {**BATCHES[0], "user": BATCHES[0]["user"].copy()}
    wrong["user"][3] = 24
    with pytest.raises(ValueError, match=r"'user' has the id 24 in row 3 .* table 'user' has 24"):
        step(state, wrong)
    state, metrics = step(state, jax.tree.map(jax.numpy.asarray, wrong))
    assert np.isnan(metrics["loss"]).any()
    state, _ = step(state, BATCHES[0])
    with pytest.raises(ValueError, match="1 ids of feature 'user' were not in table 'user'"):
        step(state, BATCHES[0])
    with pytest.raises(ValueError, match="`mesh` has the axes"):
        step_of(1, mesh=mesh, sync=local)


@pytest.mark.parametrize("kind", ["virtual", "devices"])
def test_batches_of_the_host_that_were_placed_are_waited_for_by_nobody(kind):
    """Their ids are known to be in the tables."""
    axes = {"replica": REPLICAS}
    mesh = js.virtual_mesh(axes) if kind == "virtual" else js.make_mesh(axes, jax.devices()[:2])
    step = step_of(1, mesh=mesh, embeddings=embeddings(axis=None), sync=local)
    batch, _ = step.place(BATCHES[0])
    step._runner.placing.ran(batch, {"embeddings/user/invalid": 1})
    step.refuse_ids()
    step._runner.placing.ran(jax.tree.map(jax.numpy.copy, batch), {"embeddings/user/invalid": 1})
    with pytest.raises(ValueError, match="1 ids of feature 'user'"):
        step.refuse_ids()


def test_ids_of_devices_are_refused_after_every_kind_of_call():
    mesh = js.virtual_mesh({"replica": REPLICAS})
    step = step_of(1, mesh=mesh, embeddings=embeddings(axis=None), sync=local)
    state = step.init(DENSE)
    wrong = jax.tree.map(jax.numpy.asarray, BATCHES[0])
    wrong["user"] = wrong["user"].at[3].set(24)
    ahead = step.ahead("exact")
    asked = ahead.prime(state, wrong)
    for call in (
        lambda: step.collect(state, wrong),
        lambda: step.evaluate(state, wrong),
        lambda: ahead(state, wrong, asked, None, collect=True),
    ):
        call()
        with pytest.raises(ValueError, match="1 ids of feature 'user' were not in table 'user'"):
            step.refuse_ids()
        step.refuse_ids()  # refused once


def test_ids_that_inputs_makes_on_a_device_are_counted_there():
    """Though the batch is of the host: what it holds is not what is looked up."""
    inputs = lambda batch: {"user": jax.numpy.asarray(batch["user"]) + 1}  # noqa: E731
    step = js.make_train_step(
        lambda params, batch, *, embedded: embedded["user"].mean() * params["b"],
        optax.sgd(0.3),
        mesh=js.make_mesh({"replica": REPLICAS}, devices=jax.devices()[:REPLICAS]),
        embeddings=embeddings(axis=None, inputs=inputs),
        sync=local,
    )
    state, batch = step.init(DENSE), {"user": np.array([23, 0])}
    step.evaluate(state, batch)
    with pytest.raises(ValueError, match="1 ids of feature 'user' were not in table 'user'"):
        step.refuse_ids()


def test_tables_of_ones_own():
    """Each device is given its part of stored tables, and all replicas the same."""
    step = step_of(2, shard="column", sync=local)
    made = step.init(DENSE)
    tables = {name: np.random.default_rng(0).normal(size=size) for name, size in SIZES.items()}
    state = step.init(js.WithTables(DENSE, step.embeddings.write(tables)))
    for name, table in whole(step, state).items():
        np.testing.assert_array_equal(table, np.stack([np.float32(tables[name])] * REPLICAS))
    alike = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), state, made)
    assert all(jax.tree.leaves(alike))
    with pytest.raises(ValueError, match=r"`params` must hold stored .* got {'item': \(3, 4\)}"):
        step.init(js.WithTables(DENSE, {"item": np.zeros((3, 4))}))
    with pytest.raises(ValueError, match=r"`embeddings` must be made by js.embeddings, got dict"):
        js.make_train_step(loss, optax.sgd(0.1), mesh=step.mesh, embeddings={})


def test_the_order_of_dense_gradients():
    step = step_of(2, sync=local)
    assert step.ready_order(step.init(DENSE), BATCHES[0]) == (0, 1)  # b is added last
