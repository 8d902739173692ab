"""The mean over replicas is that of the whole tables, however it is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from support.executions import lift
from support.reports import rows as rows_of

REPLICAS, NUM_ROWS, ENTRIES = 4, 24, 6
CLOSE = {"rtol": 0, "atol": 1e-6}


def entries(seed=0, replicas=REPLICAS, num_rows=NUM_ROWS, size=ENTRIES, tail=(3,)):
    """Rows with duplicates, and their values, stacked over replicas."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, num_rows + 1, size=(replicas, size)).astype(np.int32)  # with padding
    rows[:, :2] = rows[:, :1]
    return rows, rng.normal(size=(replicas, size, *tail)).astype(np.float32)


def dense_of(rows, values, num_rows=NUM_ROWS):
    """Each replica's gradient as a table."""
    out = np.zeros((len(rows), num_rows + 1, *values.shape[2:]), np.float32)
    for replica, (r, v) in enumerate(zip(rows, values, strict=True)):
        np.add.at(out[replica], r, v)
    return out[:, :num_rows]


def reduced(**options):
    """`(rows, values, ...) -> (mean, state)` of one replica."""
    tx = js.sparse.all_reduce_rows("replica", **options)

    def step(rows, values, weight=None):
        grads = {"table": js.sparse.RowGradient(rows, values, NUM_ROWS)}
        grads, state = tx.update(grads, tx.init({"table": None}), weight=weight)
        return grads["table"], state

    return step


def of_array(**options):
    """As `reduced`, with the gradient as an array; another leaf stays as it is."""
    tx = js.sparse.all_reduce_rows("replica", tables=("table",), **options)

    def step(rows, values, weight=None):
        grads = {"table": js.sparse.RowGradient(rows, values, NUM_ROWS).to_dense(), "other": values}
        grads, state = tx.update(grads, tx.init(grads), weight=weight)
        assert grads["other"] is values
        return grads["table"], state

    return step


# What each sends in the first place, and whether some replica has more rows than that.
ACTIVE = {"divide_by": "active"}
WAYS = {
    "rows": (reduced, {"path": "rows"}, False),
    "table": (reduced, {"path": "dense"}, False),
    "table, active": (reduced, {"path": "dense", **ACTIVE}, False),
    "capacity": (reduced, {"path": "rows", "capacity": 5, **ACTIVE}, False),
    "overflow to rows": (reduced, {"path": "rows", "capacity": 2, **ACTIVE}, True),
    "overflow to the table": (reduced, {"path": "auto", "capacity": 2}, True),
    "array overflows": (of_array, {"capacity": 2}, True),
    "array as rows": (of_array, {"capacity": 5, "output": "rows", **ACTIVE}, False),
    "as rows overflow": (reduced, {"output": "rows", "capacity": 1}, True),
}


def all_ways(rows, values, weight):
    ways = {name: make(**options) for name, (make, options, _) in WAYS.items()}
    return {name: step(rows, values, weight) for name, step in ways.items()}


def as_arrays(mean):
    """Per replica as a table; rows must be sorted, each once, padding behind and zero."""
    if not isinstance(mean, js.sparse.RowGradient):
        return np.asarray(mean)
    rows, values = np.asarray(mean.rows), np.asarray(mean.values)
    for r, v in zip(rows, values, strict=True):
        real = r[r < NUM_ROWS]
        assert real.tolist() == sorted(set(real.tolist()))
        assert (r[len(real) :] == NUM_ROWS).all()
        assert not v[len(real) :].any()
    return dense_of(rows, values)


def test_every_way_gives_the_weighted_mean():
    """The second replica has run out: whatever it holds is ignored."""
    rows, values = entries(seed=1)
    weight = np.array([3.0, 0.0, 1.0, 2.0], np.float32)
    tables = dense_of(rows, values)
    wanted = np.einsum("r,r...->...", weight, tables) / weight.sum()
    values[1] = np.nan
    run = lift(all_ways, {"replica": REPLICAS}, "shard_map", (False,) * 3)
    found = run(rows, values, weight)
    distinct = max(len(set(r[r < NUM_ROWS].tolist())) for r in rows)
    for name, (_, options, overflows) in WAYS.items():
        mean, state = found[name]
        tables, share = as_arrays(mean), 1 if "divide_by" in options else 3 / 4
        np.testing.assert_allclose(tables, np.broadcast_to(share * wanted, tables.shape), **CLOSE)
        assert (tables == tables[0]).all()
        assert np.asarray(state.overflows).tolist() == [int(overflows)] * len(rows), name
        if options.get("path") != "dense":
            assert np.asarray(state.needed).tolist() == [distinct] * len(rows), name
    # An optimizer may decay the rows that a mean names: those of an idle replica alone are not.
    used = {*rows[weight > 0].ravel().tolist(), NUM_ROWS}
    named = [np.asarray(x.rows) for x, _ in found.values() if isinstance(x, js.sparse.RowGradient)]
    assert named
    assert all(set(each.ravel().tolist()) <= used for each in named)
    assert not {*rows.ravel().tolist()} <= used
    for mean, _ in run(rows, values, 0 * weight).values():
        assert not as_arrays(mean).any()


# What it sends

ROW_BYTES = 4 * 5


def report(weighted=False, num_rows=1000, **options) -> js.reports.CommReport:
    tx = js.sparse.all_reduce_rows("replica", **options)

    def step(rows, values):
        grads = {"table": js.sparse.RowGradient(rows, values, num_rows)}
        return tx.update(grads, tx.init({"table": 0}), weight=values[0, 0] if weighted else None)

    types = ((ENTRIES,), jnp.int32), ((ENTRIES, 5), jnp.float32)
    arguments = [jax.ShapeDtypeStruct((REPLICAS, *shape), dtype) for shape, dtype in types]
    run = lift(step, {"replica": REPLICAS}, "shard_map_unchecked", (False, False))
    return js.comm_report_of(run.lower(*arguments), compile=False)


def gathered(entries: int, numbers: int = 2) -> set[tuple[str, int, int]]:
    """One all-gather of row numbers, and what goes with them, and one of values."""
    return {("all-gather", 2, REPLICAS * (4 * (entries + numbers) + entries * ROW_BYTES))}


@pytest.mark.parametrize("options", [{"output": "rows"}, {"capacity": 6, "weighted": True}])
def test_rows_are_two_all_gathers(options):
    """A weight adds a number."""
    found = report(**options)
    assert found.kinds == ("every",)
    assert rows_of(found, "every") == gathered(ENTRIES, 3 if "weighted" in options else 2)


def test_with_a_capacity_fewer_rows_are_sent_and_more_where_it_does_not_suffice():
    found = report(capacity=2)
    assert set(found.kinds) == {"local", "overflow"}
    assert rows_of(found, "local") == gathered(2)
    assert rows_of(found, "overflow") == gathered(2) | gathered(ENTRIES)


def test_rows_are_sent_up_to_equal_bytes_on_the_wire():
    """R * k * (4 + w) <= 2 * N * w: 4 * 6 * 24 = 576, and a row of the table counts for 40."""
    assert rows_of(report(num_rows=15), "every") == gathered(ENTRIES)
    assert ("all-reduce", 1, 14 * ROW_BYTES) in rows_of(report(num_rows=14), "every")
