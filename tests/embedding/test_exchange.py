"""What travels, how often and how many bytes; which ids get a slot where there are too few."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from embedding.shared import update_of
from support.reports import rows as rows_of

DEVICES, LENGTH = 4, 3
IDS = 16 // DEVICES * LENGTH  # of a device and table
INT, FLOAT, HALF = 4, 4, 2


def report(tables, num_shards=DEVICES, **options) -> js.reports.CommReport:
    options = {"axis_name": "shard", "optimizer": js.rowwise_adagrad(0.1), **options}
    emb = js.embeddings(tables, **options).over(num_shards)
    stored = jax.eval_shape(emb.init, jax.random.key(0))
    state = jax.eval_shape(emb.init_optimizer, stored)
    bags = {name: jax.ShapeDtypeStruct((16, LENGTH), jnp.int32) for name in emb.tables}
    return js.comm_report_of(update_of(emb, num_shards).lower(stored, state, bags), compile=False)


def test_a_capacity_is_what_travels_and_each_dtype_travels_by_itself():
    """An update is one all-to-all of ids for all tables, and one of vectors each way by dtype.

    Of five whole tables on four devices the fullest holds two: they share slots.
    """
    tables = {"a": js.Table(1000, 8), "b": js.Table(1000, 4, dtype=jnp.bfloat16)}
    tables |= {f"t{i}": js.Table(1000, 8, shard="table") for i in range(5)}
    a, b, t = DEVICES * 5, DEVICES * IDS, DEVICES * 2 * IDS
    total = INT * (a + b + t) + 2 * (FLOAT * 8 * (a + t) + HALF * 4 * b)
    found = report(tables, capacity={"a": 5})
    assert rows_of(found, "every", "shard") == {("all-to-all", 5, total)}


def test_no_more_slots_than_ids_or_rows_of_an_owner():
    per_slot = INT + 2 * FLOAT * 8
    for shard, slots in (("row", IDS), ("table", 5)):  # rows lie in 64 parts, 16 of them each
        found = report({"t": js.Table(5, 8, shard=shard)}, capacity=1000)
        assert rows_of(found, "every", "shard") == {("all-to-all", 3, per_slot * DEVICES * slots)}


def test_columns_gather_ids_and_add_up_squares():
    tables = {name: js.Table(1000, 8, shard="column") for name in ("a", "b")}
    slots = DEVICES * 2 * IDS
    vectors = ("all-to-all", 2, 2 * FLOAT * 8 // DEVICES * slots)
    gathered = ("all-gather", 1, INT * slots)
    squares = ("all-reduce", 1, FLOAT * slots)
    assert rows_of(report(tables), "every", "shard") == {vectors, gathered, squares}
    sgd = report(tables, optimizer=js.rowwise_sgd(0.1))
    assert rows_of(sgd, "every", "shard") == {vectors, gathered}


CAPACITY = {"rows": 2, "columns": 3, "first": 1, "second": 4}
# Whole tables lie in one array; two of the five are on one of the four devices.
KINDS = {"rows": (90, "row"), "columns": (30, "column"), "first": (20, "table")}
KINDS |= {name: (50 - 10 * i, "table") for i, name in enumerate(["second", "third", "4th", "5th"])}


@functools.cache
def lookups():
    """Embeddings without pooling on four devices, their tables, and what an update returns."""
    tables = {n: js.Table(rows, 4, shard=s, pooling=None) for n, (rows, s) in KINDS.items()}
    emb = js.embeddings(
        tables,
        axis_name="shard",
        optimizer=js.rowwise_sgd(1.0),
        capacity=CAPACITY,
        overflow="drop",
    ).over(DEVICES)
    rng = np.random.default_rng(0)
    values = {n: rng.normal(size=(rows, 4)).astype("f4") for n, (rows, _) in KINDS.items()}

    def run(tables, state, bags):
        requests = emb.exchange_ids(bags)
        vectors = emb.lookup(tables, requests)
        grads = jax.grad(lambda v: sum(x.sum() for x in emb.pooled(v, requests).values()))(vectors)
        tables, state = emb.apply(tables, state, emb.send_back(grads, requests))
        counts = {name: x[None] for name, x in emb.metrics(requests).items()}
        return emb.pooled(vectors, requests), tables, counts

    specs, split = (emb.specs, emb.optimizer_specs), P("shard")
    program = jax.shard_map(
        run,
        mesh=js.make_mesh({"shard": DEVICES}, devices=jax.devices()[:DEVICES]),
        in_specs=(*specs, split),
        out_specs=(split, emb.specs, split),
    )
    return emb, values, jax.jit(program)


def owners_of(emb, name):
    """Read off the arrays which device holds each row: 0 where all devices hold all rows."""
    rows, shard = KINDS[name]
    zeros = {n: np.zeros((r, 4)) for n, (r, _) in KINDS.items()}
    numbers = 1 + np.tile(np.arange(rows)[:, None], 4)
    (found,) = (x for x in emb.write({**zeros, name: numbers}).values() if np.any(x))
    place = {int(x): i for i, x in enumerate(np.asarray(found)[:, 0])}
    local = len(found) if shard == "column" else len(found) // DEVICES
    return np.array([place[1 + row] // local for row in range(rows)])


@settings(max_examples=4)
@given(st.integers(0, 2**20), st.booleans())
def test_each_owner_has_so_many_slots_for_distinct_ids(seed, few):
    """A row is looked up everywhere on a device or nowhere, and only then it is updated."""
    emb, values, program = lookups()
    rng, bags = np.random.default_rng(seed), {}
    for name, (rows, _) in KINDS.items():
        bags[name] = rng.integers(-1, 4 if few else rows, (DEVICES * 2, 5)).astype(np.int32)
    stored = emb.write(values)
    found, tables, counts = program(stored, emb.init_optimizer(stored), bags)
    after = emb.read(tables)
    for name, ids in bags.items():
        owners, capacity = owners_of(emb, name), CAPACITY.get(name, 10)
        moved = np.zeros(len(values[name]))
        for device in range(DEVICES):
            own = ids.reshape(DEVICES, -1)[device]
            vectors = np.asarray(found[name]).reshape(DEVICES, -1, 4)[device]
            present = vectors.any(axis=1)
            kept = set(own[present].tolist())
            np.testing.assert_array_equal(vectors[present], values[name][own[present]])
            assert not kept & set(own[~present].tolist())
            real = np.unique(own[own >= 0])
            asked = np.bincount(owners[real], minlength=DEVICES)
            had = np.bincount(owners[sorted(kept)], minlength=DEVICES) if kept else 0 * asked
            np.testing.assert_array_equal(had, np.minimum(asked, capacity))
            moved += np.bincount(own[present], minlength=len(moved))
            expected = {"asked": len(real), "overflow": (asked - had).sum(), "invalid": 0}
            for what, count in expected.items():
                assert counts[f"embeddings/{name}/{what}"][device] == count
        np.testing.assert_allclose(after[name], values[name] - moved[:, None], atol=1e-5)
    needed = emb.slots_needed(bags, num_parts=DEVICES)
    for name, ids in bags.items():
        owners = owners_of(emb, name)
        parts = [np.unique(part[part >= 0]) for part in ids.reshape(DEVICES, -1)]
        most = max(np.bincount(owners[part], minlength=1).max() for part in parts)
        assert needed[name] == max(1, most)
