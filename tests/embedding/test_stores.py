"""Where rows lie: each in one place, alike for many numbers of devices, small ids apart."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import jaxslowmo as js
from embedding.shared import embeddings_of_all_kinds
from jaxslowmo.embedding._stores import layout_of
from support.exhaustive import sweep

SIZES = (1, 2, 3, 4, 6, 8, 64)


def place_of(table: js.Table, num_shards: int):
    layout = layout_of({"t": table}, num_shards)
    return layout.stores["t"], layout.places["t"]


@pytest.mark.parametrize(
    ("num_rows", "num_shards"),
    sweep(
        itertools.product([1, 5, 64, 100, 1000], SIZES),
        lambda rows, shards: (rows, shards) in [(5, 8), (100, 6), (1000, 4)],
    ),
)
def test_every_row_has_a_place_of_its_own(num_rows, num_shards):
    store, place = place_of(js.Table(num_rows, 4), num_shards)
    positions = np.asarray(place.positions(jnp.arange(num_rows + 1, dtype=jnp.int32)))
    assert positions[-1] == place.num_positions == store.num_rows  # no row at all
    assert len(set(positions[:-1])) == num_rows
    assert positions[:-1].min() >= 0
    assert positions[:-1].max() < store.num_rows
    owners = place.owners_of(np.arange(num_rows))
    np.testing.assert_array_equal(owners, positions[:-1] // store.local_rows)


@pytest.mark.parametrize("num_shards", SIZES)
def test_neighbouring_rows_lie_on_different_devices(num_shards):
    _, place = place_of(js.Table(1000, 4), num_shards)
    owners = place.owners_of(np.arange(640))
    if num_shards in (1, 2, 4, 8, 64):
        assert all(len(set(owners[i : i + num_shards])) == num_shards for i in range(576))
    assert np.ptp(np.bincount(owners, minlength=num_shards)) <= 64 // num_shards


def test_one_two_four_to_64_devices_store_a_table_alike():
    stored = [
        js.embeddings({"t": js.Table(70, 2)}, axis_name="s", optimizer=js.rowwise_sgd(0.1))
        .over(size)
        .write({"t": np.arange(140.0).reshape(70, 2)})["t"]
        for size in (1, 2, 4, 64)
    ]
    assert stored[0].shape == (128, 2)
    for other in stored[1:]:
        np.testing.assert_array_equal(stored[0], other)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_read_undoes_write(num_shards):
    emb = embeddings_of_all_kinds()
    if num_shards == 3:
        emb = js.embeddings(
            {"a": js.Table(70, 3, shard="row"), "b": js.Table(9, 3, shard="column")},
            axis_name="shard",
            optimizer=js.rowwise_sgd(0.1),
        )
    emb = emb.over(num_shards)
    tables = {
        name: np.random.RandomState(0).rand(t.num_rows, t.dim).astype(np.float32)
        for name, t in emb.tables.items()
    }
    stored = emb.write(tables)
    assert set(stored) == set(emb.specs)
    for name, table in emb.read(stored).items():
        np.testing.assert_array_equal(table, tables[name])


@pytest.mark.parametrize("explicit", sweep([False, True], lambda x: x))
def test_tables_are_read_off_devices_with_either_kind_of_axes(mesh_of, explicit):
    mesh = mesh_of({"shard": 4}, explicit=explicit)
    assert (AxisType.Explicit in mesh.axis_types) == explicit
    emb = embeddings_of_all_kinds().over(mesh)
    whole = jax.jit(emb.init)(jax.random.key(0))
    placed = {n: jax.device_put(x, NamedSharding(mesh, emb.specs[n])) for n, x in whole.items()}
    bags = {"t0": np.array([[0, 39], [-1, 7]])}

    @jax.jit
    def used(stored):
        tables = emb.read(stored)
        return tables, emb.write(tables), emb.reference(stored, bags)

    for found, want in zip(*map(jax.tree.leaves, (used(placed), used(whole))), strict=True):
        np.testing.assert_array_equal(found, want)
    tables = emb.read(placed) if explicit else {}  # without jit, where types tell how arrays lie
    for name, table in tables.items():
        np.testing.assert_array_equal(table, used(whole)[0][name])


def test_whole_tables_are_spread_by_their_rows_and_those_of_a_width_share_an_array():
    rows = {"a": 100, "b": 60, "c": 50, "d": 10, "e": 5}
    tables = {name: js.Table(n, 4, shard="table") for name, n in rows.items()}
    tables["wide"] = js.Table(7, 8, shard="table")
    tables["half"] = js.Table(7, 4, shard="table", dtype=jnp.bfloat16)
    layout = layout_of(tables, 2)
    assert {n: s.num_rows for n, s in layout.stores.items()} == {
        "tables_float32_4_over_2": 2 * 115,  # 100 + 10 + 5 and 60 + 50
        "tables_float32_8_over_2": 2 * 7,
        "tables_bfloat16_4_over_2": 2 * 7,
    }
    assert {n: p.first_owner for n, p in layout.places.items() if n in rows} == {
        "a": 0,
        "b": 1,
        "c": 1,
        "d": 0,
        "e": 0,
    }
    assert [layout.places[n].first_row for n in rows] == [0, 0, 60, 100, 110]


def test_columns_must_be_shared_evenly():
    emb = js.embeddings(
        {"user": js.Table(9, 6, shard="column")}, axis_name="s", optimizer=js.rowwise_sgd(0.1)
    )
    with pytest.raises(ValueError, match=r"'user'.*number of devices \(4\) must divide `dim`.*6"):
        emb.over(4)


def test_arrays_that_int32_cannot_number_are_refused():
    tables = {f"t{i}": js.Table(2**30, 4, shard="table") for i in range(3)}
    emb = js.embeddings(tables, axis_name="s", optimizer=js.rowwise_sgd(0.1))
    with pytest.raises(ValueError, match="rows with padding"):
        emb.over(1)
