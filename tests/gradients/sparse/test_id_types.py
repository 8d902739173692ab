"""Row numbers of any integer type, against NumPy; tables beyond what a narrow type holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js

# Around the largest number of int8: the table's size itself does not fit, or just so.
SIZES = {"int8": (127, 128), "int64": (128,)}


def ids_of(dtype, num_rows):
    """Return some of the table, from either end, some twice, and some outside of it."""
    info = np.iinfo(dtype)
    near = {0, 1, num_rows - 2, num_rows - 1, num_rows, num_rows + 1, num_rows // 2}
    below = {-1, -2, -num_rows, -num_rows - 1}
    ends = {int(info.min), int(info.max), int(info.max) - 1}
    found = sorted(i for i in near | below | ends if info.min <= i <= info.max)
    return np.array([*found, *found[:3]], dtype)


def looked_up(table, ids):
    """`table[ids]` where numbers below 0 count from the end; NaN outside of the table."""
    num_rows = len(table)
    whole = [int(i) + num_rows if i < 0 else int(i) for i in ids]
    held = [0 <= i < num_rows for i in whole]
    out = np.full((len(ids), *table.shape[1:]), np.nan)
    out[held] = table[[i for i, is_held in zip(whole, held, strict=True) if is_held]]
    return out, [i if is_held else None for i, is_held in zip(whole, held, strict=True)]


def summed(rows, values, num_rows):
    """Return a gradient as a table: rows that it does not have are left out, those below 0 too."""
    out = np.zeros((num_rows, *values.shape[1:]))
    for row, value in zip(rows, values, strict=True):
        if row is not None and 0 <= int(row) < num_rows:
            out[int(row)] += value
    return out


@pytest.fixture(params=["int8", "int64"])
def dtype(request):
    """Types of 64 bits exist under x64 only."""
    with jax.enable_x64(request.param.endswith("64")):
        yield request.param


def test_lookups(dtype):
    """Each row is found, and has its gradient; nothing else is, or has."""
    tables = {n: np.arange(1, 2 * n + 1, dtype=np.float32).reshape(n, 2) for n in SIZES[dtype]}
    ids = {n: ids_of(dtype, n) for n in tables}
    slopes = {n: np.arange(1, len(i) + 1, dtype=np.float32)[:, None] for n, i in ids.items()}

    def loss(params, ids):
        found = {n: params[n][i] for n, i in ids.items()}
        kept = {n: jnp.where(jnp.isnan(x), 0, x) * slopes[n] for n, x in found.items()}
        return sum(x.sum() for x in kept.values()), found

    @jax.jit
    def program(tables, ids):
        by_name = lambda ids: {str(n): i for n, i in ids.items()}  # noqa: E731
        (_, found), grads = js.row_value_and_grad(loss, by_name, has_aux=True)(tables, ids)
        return found, grads, {n: g.to_dense() for n, g in grads.items()}

    found, grads, dense = program(tables, ids)
    for n in tables:
        wanted, rows = looked_up(tables[n], ids[n])
        np.testing.assert_array_equal(found[n], wanted)
        np.testing.assert_array_equal(dense[n], summed(rows, np.repeat(slopes[n], 2, 1), n))
        distinct = sorted({r for r in rows if r is not None})
        assert grads[n].rows.dtype == jnp.int32
        assert grads[n].rows.tolist() == (distinct + [n] * len(rows))[: len(grads[n].rows)]


def test_gradients_made_by_hand(dtype):
    """As a table, each row once, added to another, reduced, and as a step of SGD."""
    rows = {n: ids_of(dtype, n) for n in SIZES[dtype]}
    values = {n: np.arange(1.0, 1 + len(r), dtype=np.float32) for n, r in rows.items()}
    ways = {"rows, too few": {"path": "rows", "capacity": 1}, "table": {"path": "dense"}}
    ways = {name: js.sparse.all_reduce_rows("replica", **options) for name, options in ways.items()}

    def program(rows, values):
        found = {}
        for n in rows:
            gradient, one = js.sparse.RowGradient(rows[n], values[n], n), jnp.ones(1, jnp.float32)
            other = js.sparse.RowGradient(jnp.array([n - 1], jnp.int32), one, n)
            means = {
                way: tx.update({"t": gradient}, tx.init({"t": None})) for way, tx in ways.items()
            }
            table = jnp.zeros(n, jnp.float32)
            dense = {
                "whole": gradient.to_dense(),
                "once": js.sparse.coalesce(gradient).gradient.to_dense(),
                **{way: mean["t"] for way, (mean, _) in means.items()},
                "moved": -2 * js.sparse.apply_rows(table, gradient, learning_rate=0.5),
            }
            invalid = [state.invalid for _, state in means.values()]
            found[n] = dense, (gradient + other, other + gradient), invalid
        return found

    on_one = jax.vmap(program, axis_name="replica", axis_size=1, in_axes=None)
    found = jax.tree.map(lambda x: x[0], jax.jit(on_one)(rows, values))
    for n, (dense, sums, invalid) in found.items():
        whole = summed(rows[n], values[n], n)
        for what, x in dense.items():
            np.testing.assert_array_equal(x, whole, err_msg=f"{what}, {n} rows")
        for x in sums:
            np.testing.assert_array_equal(x.to_dense(), whole + np.eye(n)[-1])
        # Padding does not count.
        assert invalid == [sum(not 0 <= int(r) <= n for r in rows[n])] * 2
