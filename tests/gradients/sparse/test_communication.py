"""What the reduction of rows sends: collectives and bytes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.reports import rows as rows_of

REPLICAS, NUM_ROWS, ENTRIES, ROW_BYTES = 4, 1000, 6, 4 * 5
TABLE_BYTES = NUM_ROWS * ROW_BYTES


def report(weighted=False, num_rows=NUM_ROWS, **options) -> js.reports.CommReport:
    tx = js.sparse.all_reduce_rows("replica", **options)

    def per_device(rows, values):
        grads = {"table": js.sparse.RowGradient(rows, values, num_rows)}
        weight = values[0, 0] if weighted else None
        out = tx.update(grads, tx.init({"table": 0}), weight=weight)
        return jax.tree.map(lambda x: x[None], out)

    run = jax.shard_map(
        per_device,
        mesh=js.make_mesh({"replica": REPLICAS}),
        in_specs=P("replica"),
        out_specs=P("replica"),
        check_vma=False,
    )
    lowered = jax.jit(run).lower(
        jax.ShapeDtypeStruct((REPLICAS * ENTRIES,), jnp.int32),
        jax.ShapeDtypeStruct((REPLICAS * ENTRIES, 5), jnp.float32),
    )
    return js.comm_report_of(lowered, compile=False)


def gathered(entries: int, numbers: int = 2) -> set[tuple[str, int, int]]:
    """One all-gather of row numbers, and what goes with them, and one of values."""
    return {("all-gather", 2, REPLICAS * (4 * (entries + numbers) + entries * ROW_BYTES))}


@pytest.mark.parametrize("options", [{}, {"output": "rows"}, {"capacity": 6, "weighted": True}])
def test_rows_are_two_all_gathers(options):
    """A weight adds a number."""
    found = report(**options)
    assert found.kinds == ("every",)
    assert rows_of(found, "every") == gathered(ENTRIES, 3 if "weighted" in options else 2)


def test_a_table_is_one_all_reduce():
    assert rows_of(report(True, path="dense"), "every") == {
        ("all-reduce", 1, TABLE_BYTES),
        ("all-gather", 1, REPLICAS * 4 * 3),
    }


def test_with_a_capacity_fewer_rows_are_sent_and_more_where_it_does_not_suffice():
    found = report(capacity=2)
    assert set(found.kinds) == {"local", "overflow"}
    assert rows_of(found, "local") == gathered(2)
    assert rows_of(found, "overflow") == gathered(2) | gathered(ENTRIES)


def test_rows_are_sent_up_to_equal_bytes_on_the_wire():
    """R * k * (4 + w) <= 2 * N * w: 4 * 6 * 24 = 576, and a row of the table counts for 40."""
    assert rows_of(report(num_rows=15), "every") == gathered(ENTRIES)
    assert ("all-reduce", 1, 14 * ROW_BYTES) in rows_of(report(num_rows=14), "every")
