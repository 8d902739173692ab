"""Row numbers of every integer type, against NumPy; tables beyond what a narrow type holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from support.executions import lift
from support.exhaustive import sweep

NARROW = ("int8", "uint8", "int16", "uint16")
DTYPES = (*NARROW, "int32", "uint32", "int64", "uint64")
# Around the largest numbers of int8 and uint8: the table's size itself does not fit, or just so.
SIZES = (100, 127, 128, 255, 256, 300)


def ids_of(dtype, num_rows):
    """Some of the table, from either end, some twice, and some outside of it."""
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
    """A gradient as a table: rows that it does not have are left out, those below 0 too."""
    out = np.zeros((num_rows, *values.shape[1:]))
    for row, value in zip(rows, values, strict=True):
        if row is not None and 0 <= int(row) < num_rows:
            out[int(row)] += value
    return out


def table_of(num_rows):
    return np.arange(1, 2 * num_rows + 1, dtype=np.float32).reshape(num_rows, 2)


# Usual are a narrow type with and without a sign, the most common one, and one of 64 bits.
@pytest.fixture(params=sweep(DTYPES, lambda dtype: dtype in ("int8", "uint8", "int32", "int64")))
def dtype(request):
    """Types of 64 bits exist under x64 only."""
    with jax.enable_x64(request.param.endswith("64")):
        yield request.param


def test_lookups(dtype, strict_promotion):
    """Each row is found, and has its gradient; nothing else is, or has."""
    tables = {n: table_of(n) for n in SIZES}
    ids = {n: ids_of(dtype, n) for n in SIZES}
    slopes = {n: np.arange(1, len(i) + 1, dtype=np.float32)[:, None] for n, i in ids.items()}

    def loss(params, ids):
        found = {n: params[n][i] for n, i in ids.items()}
        kept = {n: jnp.where(jnp.isnan(x), 0, x) * slopes[n] for n, x in found.items()}
        return sum(x.sum() for x in kept.values()), found

    @jax.jit
    def program(tables, ids):
        by_name = lambda ids: {str(n): i for n, i in ids.items()}  # noqa: E731
        (_, found), grads = js.row_value_and_grad(loss, by_name, has_aux=True)(tables, ids)
        gathered = {n: js.gather_rows(x, ids[n]) for n, x in tables.items()}
        return found, {n: g.to_dense() for n, g in grads.items()}, gathered

    found, grads, gathered = program(tables, ids)
    for n in SIZES:
        wanted, rows = looked_up(tables[n], ids[n])
        np.testing.assert_array_equal(found[n], wanted)
        whole = summed(rows, np.broadcast_to(slopes[n], wanted.shape), n)
        np.testing.assert_array_equal(grads[n], whole)
        touched, positions, overflow = gathered[n]
        assert overflow == 0
        assert (touched.rows.dtype, positions.dtype) == (jnp.int32, jnp.int32)
        distinct = sorted({r for r in rows if r is not None})
        assert touched.rows.tolist() == (distinct + [n] * len(rows))[: len(touched.rows)]


def test_gradients_made_by_hand(dtype, strict_promotion):
    """As a table, each row once, added to another, and as a step of SGD."""
    rows = {n: ids_of(dtype, n) for n in SIZES}
    values = {
        n: np.arange(1, 2 * len(r) + 1, dtype=np.float32).reshape(-1, 2) for n, r in rows.items()
    }

    @jax.jit
    def program(rows, values):
        found = {}
        for n in SIZES:
            gradient = js.RowGradient(rows[n], values[n], n)
            one = jnp.ones((1, 2), jnp.float32)
            other = js.RowGradient(jnp.array([n - 1], jnp.int32), one, n)
            table = jnp.zeros((n, 2), jnp.float32)
            once = js.coalesce(gradient).gradient
            found[n] = {
                "whole": gradient.to_dense(),
                "rows": once.rows,
                "once": once.to_dense(),
                "sum": (gradient + other).to_dense(),
                "sum the other way": (other + gradient).to_dense(),
                "moved": js.apply_rows(table, gradient, learning_rate=0.5),
            }
        return found

    found = program(rows, values)
    for n in SIZES:
        whole = summed(rows[n], values[n], n)
        both = whole + summed([n - 1], np.ones((1, 2)), n)
        distinct = sorted({int(r) for r in rows[n] if 0 <= r < n})
        wanted = {
            "whole": whole,
            "rows": (distinct + [n] * len(rows[n]))[: len(rows[n])],
            "once": whole,
            "sum": both,
            "sum the other way": both,
            "moved": -0.5 * whole,
        }
        for what, x in wanted.items():
            np.testing.assert_array_equal(found[n][what], x, err_msg=f"{what}, {n} rows")


def test_reductions(dtype, strict_promotion):
    """The mean over replicas; and how many entries lie outside of the table, padding apart."""
    sizes = (128, 256, 300)
    rows = {n: np.stack([ids_of(dtype, n)] * 2) for n in sizes}
    values = {
        n: np.arange(1, 2 * r.size + 1, dtype=np.float32).reshape(*r.shape, 2)
        for n, r in rows.items()
    }
    transforms = {
        "as a table": js.all_reduce_rows("replica", path="rows"),
        "as rows": js.all_reduce_rows("replica", output="rows"),
        "short": js.all_reduce_rows("replica", path="rows", capacity=1),
    }

    def step(rows, values):
        found = {}
        for name, tx in transforms.items():
            for n in sizes:
                # Of two parts of one type, as microbatches have them.
                grads = js.RowGradient(rows[n][:2], values[n][:2], n)
                grads = grads + js.RowGradient(rows[n][2:], values[n][2:], n)
                mean, state = tx.update({"t": grads}, tx.init({"t": None}))
                mean = mean["t"].to_dense() if name == "as rows" else mean["t"]
                found[name, n] = mean, state.invalid
        return found

    found = lift(step, {"replica": 2}, "vmap", (False,) * 2)(rows, values)
    for (name, n), (mean, invalid) in found.items():
        each = [summed(r, v, n) for r, v in zip(rows[n], values[n], strict=True)]
        wanted = np.stack([np.mean(each, axis=0)] * 2)
        np.testing.assert_array_equal(mean, wanted, err_msg=f"{name}, {n} rows")
        assert invalid.tolist() == [sum(not 0 <= int(r) <= n for r in rows[n].ravel())] * 2


def test_bytes_as_tokens_of_a_table_of_256_rows():
    """What the library's own windows yield: each token in its own row, not all in row 0."""
    tokens = np.arange(256, dtype=np.uint8)
    step = js.row_value_and_grad(lambda p, t: p["e"][t].sum(), lambda t: {"e": t})
    value, grads = step({"e": jnp.ones((256, 1))}, tokens)
    assert value == 256
    assert grads["e"].rows.tolist() == list(range(256))
    np.testing.assert_array_equal(grads["e"].values, np.ones((256, 1)))


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_numbers_of_four_bits(dtype):
    ids = jnp.asarray([0, 3, 7, 3]).astype(dtype)
    found = js.gather_rows(jnp.arange(20.0)[:, None], ids)
    assert found.touched.rows.tolist() == [0, 3, 7, 20]
    whole = js.RowGradient(ids, jnp.ones(4), 20).to_dense()
    np.testing.assert_array_equal(whole, summed([0, 3, 7, 3], np.ones(4), 20))


def test_rows_of_a_dense_gradient_are_int32():
    with jax.enable_x64(True):
        found = js.row_gradient(jnp.ones((300, 1)), capacity=300).gradient
    assert found.rows.dtype == jnp.int32
