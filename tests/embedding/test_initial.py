"""First values: those of each device are its part of the whole, whoever shares the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from embedding.shared import SHARDS, embeddings_of_all_kinds

KEY = jax.random.key(3)


def one_table(table: js.Table, num_shards: int, **others: js.Table) -> jax.Array:
    emb = js.embeddings(
        {"t": table, **others}, axis_name="shard", optimizer=js.rowwise_sgd(0.1)
    ).over(num_shards)
    return emb.read(emb.init(KEY))["t"]


def test_each_device_makes_its_own_part():
    emb = embeddings_of_all_kinds().over(4)
    mesh = js.make_mesh({"shard": 4}, devices=jax.devices()[:4])
    local = jax.jit(
        jax.shard_map(lambda: emb.init_local(KEY), mesh=mesh, in_specs=(), out_specs=emb.specs)
    )()
    whole = jax.jit(emb.init)(KEY)
    assert set(local) == set(whole)
    for name, array in whole.items():
        np.testing.assert_array_equal(local[name], array)


def test_no_device_makes_a_whole_table():
    """The largest array of the program is a device's part of what is stored."""
    table, emb = js.Table(64 * 50, 16), None
    for shard in ("row", "column"):
        kind = js.Table(table.num_rows, table.dim, shard=shard)
        emb = js.embeddings({"t": kind}, axis_name="shard", optimizer=js.rowwise_sgd(0.1)).over(8)
        mesh = js.make_mesh({"shard": 8})
        init = jax.shard_map(
            lambda emb=emb: emb.init_local(KEY), mesh=mesh, in_specs=(), out_specs=emb.specs
        )
        memory = jax.jit(init).lower().compile().memory_analysis()
        own = 4 * table.num_rows * table.dim // 8
        assert memory.output_size_in_bytes == own
        assert memory.temp_size_in_bytes < 3 * own


def test_values_do_not_depend_on_how_a_table_is_shared_nor_on_other_tables():
    def tables():
        other = js.Table(70, 4)
        first = one_table(js.Table(70, 4), 1)
        return first, [
            one_table(js.Table(70, 4, shard=shard), size, other=other)
            for shard, size in zip(SHARDS, (2, 2, 4), strict=True)
        ]

    first, others = jax.jit(tables)()
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_tables_of_one_kind_differ():
    tables = {"a": js.Table(9, 4), "b": js.Table(9, 4)}
    emb = js.embeddings(tables, axis_name=None, optimizer=js.rowwise_sgd(0.1))
    made = jax.jit(emb.init)(KEY)
    assert not np.array_equal(made["a"], made["b"])
    assert not np.array_equal(jax.jit(emb.init)(jax.random.key(4))["a"], made["a"])


def test_they_are_uniform_and_padding_is_zero():
    emb = js.embeddings({"t": js.Table(100, 64)}, axis_name=None, optimizer=js.rowwise_sgd(0.1))
    stored = np.asarray(emb.init(KEY)["t"])
    assert stored.shape == (128, 64)
    assert sum(not row.any() for row in stored) == 28
    table = np.asarray(emb.read({"t": jnp.asarray(stored)})["t"])
    assert 0.095 < np.abs(table).max() <= 0.1
    assert abs(table.mean()) < 0.005
    assert len(np.unique(table)) > 6300


def test_an_initializer_and_a_dtype_of_ones_own():
    table = js.Table(9, 4, init=jax.nn.initializers.constant(0.5), dtype="bfloat16")
    found = one_table(table, 2)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, np.full((9, 4), 0.5, jnp.bfloat16))


def test_an_initializer_of_another_shape_is_refused():
    table = js.Table(9, 4, init=lambda key, shape, dtype: jnp.zeros(shape[1:], dtype))
    with pytest.raises(ValueError, match=r"`init` of a table of 9 rows .* \(1, 4\), got \(4,\)"):
        one_table(table, 2)


def test_specs_say_how_arrays_lie():
    emb = embeddings_of_all_kinds()
    with pytest.raises(ValueError, match=r"shard=\"table\" depends on the number of devices"):
        emb.init(KEY)
    assert emb.over(2).specs == {
        "t0": P("shard", None),
        "t1": P(None, "shard"),
        "tables_float32_8_over_2": P("shard", None),
    }
    assert emb.over(2).optimizer_specs.accumulators == {
        "t0": P("shard"),
        "t1": P(),
        "tables_float32_8_over_2": P("shard"),
    }
