"""What travels, how often and how many bytes; which ids get a slot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from embedding.shared import embeddings_of_all_kinds, update_of
from jaxslowmo.embedding._requests import SlotPlan, number_ids
from jaxslowmo.embedding._stores import layout_of
from support.reports import rows as rows_of

SHARDS, LENGTH = 4, 3
IDS = 16 // SHARDS * LENGTH  # of a device and table
INT, FLOAT, HALF = 4, 4, 2


def report(tables, num_shards=SHARDS, **options) -> js.CommReport:
    options = {"axis_name": "shard", "optimizer": js.rowwise_adagrad(0.1), **options}
    emb = js.embeddings(tables, **options).over(num_shards)
    stored = jax.eval_shape(emb.init, jax.random.key(0))
    state = jax.eval_shape(emb.init_optimizer, stored)
    bags = {name: jax.ShapeDtypeStruct((16, LENGTH), jnp.int32) for name in emb.tables}
    return js.comm_report_of(update_of(emb, num_shards).lower(stored, state, bags), compile=False)


def test_an_update_is_one_all_to_all_of_ids_and_one_of_vectors_each_way():
    slots = SHARDS * 3 * IDS
    assert rows_of(report({f"t{i}": js.Table(1000, 8) for i in range(3)}), "every", "shard") == {
        ("all-to-all", 3, INT * slots + 2 * FLOAT * 8 * slots)
    }


def test_a_capacity_is_what_travels_and_each_dtype_travels_by_itself():
    tables = {"a": js.Table(1000, 8), "b": js.Table(1000, 4, dtype=jnp.bfloat16)}
    a, b = SHARDS * 5, SHARDS * IDS
    total = INT * (a + b) + 2 * (FLOAT * 8 * a + HALF * 4 * b)
    found = report(tables, capacity={"a": 5})
    assert rows_of(found, "every", "shard") == {("all-to-all", 5, total)}


def test_columns_gather_ids_and_add_up_squares():
    tables = {name: js.Table(1000, 8, shard="column") for name in ("a", "b")}
    slots = SHARDS * 2 * IDS
    vectors = ("all-to-all", 2, 2 * FLOAT * 8 // SHARDS * slots)
    gathered = ("all-gather", 1, INT * slots)
    squares = ("all-reduce", 1, FLOAT * slots)
    assert rows_of(report(tables), "every", "shard") == {vectors, gathered, squares}
    sgd = report(tables, optimizer=js.rowwise_sgd(0.1))
    assert rows_of(sgd, "every", "shard") == {vectors, gathered}


def test_whole_tables_share_slots_where_they_are_on_different_devices():
    """Five tables on four devices: the fullest holds two."""
    tables = {f"t{i}": js.Table(1000, 8, shard="table") for i in range(5)}
    slots = SHARDS * 2 * IDS
    total = INT * slots + 2 * FLOAT * 8 * slots
    assert rows_of(report(tables), "every", "shard") == {("all-to-all", 3, total)}


@pytest.mark.parametrize("axis_name", ["shard", None])
def test_one_device_sends_nothing(axis_name):
    assert not report(embeddings_of_all_kinds().tables, 1, axis_name=axis_name).rows


NUM_ROWS, COUNT, CAPACITY = 90, 12, 3


@pytest.mark.parametrize("owners", [1, 4])
@given(ids=st.lists(st.integers(-3, NUM_ROWS + 3), min_size=COUNT, max_size=COUNT))
def test_each_distinct_id_has_one_slot_of_its_owner_up_to_the_capacity(owners, ids):
    place = layout_of({"t": js.Table(NUM_ROWS, 2)}, owners).places["t"]
    plan = SlotPlan({"t": CAPACITY}, {"t": 1}, {"t": CAPACITY + 2})
    found = _number(place, plan, np.array(ids))
    slots, by_slot = np.asarray(found.slots), {}
    for number, slot in zip(ids, slots, strict=True):
        if not 0 <= number < NUM_ROWS:
            assert slot == (-1 if number < 0 else -3)
        elif slot != -2:
            assert by_slot.setdefault(slot, number) == number
            owner, within = divmod(slot, CAPACITY + 2)
            assert owner == place.owners_of(np.array(number))
            assert 1 <= within < 1 + CAPACITY
    real = {number for number in ids if 0 <= number < NUM_ROWS}
    per_owner = np.bincount(place.owners_of(np.array(sorted(real), int)), minlength=owners)
    assert int(found.asked_for) == len(real)
    assert int(found.overflow) == np.maximum(per_owner - CAPACITY, 0).sum()
    assert len(by_slot) == np.minimum(per_owner, CAPACITY).sum()
    assert int(found.invalid) == sum(number >= NUM_ROWS for number in ids)
    # What the owner is told is the row, as it numbers it.
    told = dict(zip(np.asarray(found.slot_of_row), np.asarray(found.row), strict=True))
    for slot, number in by_slot.items():
        position = int(place.positions(jnp.array(number)))
        assert told[slot] == position % place.rows_per_owner


_COMPILED = {}


def _number(place, plan, ids):
    if place not in _COMPILED:
        _COMPILED[place] = jax.jit(lambda ids: number_ids([ids[:5], ids[5:]], place, plan, "t"))
    return _COMPILED[place](ids)
