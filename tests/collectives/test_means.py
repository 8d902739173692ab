"""Weighted means against NumPy in float64: no factor is rounded to the dtype of a leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.collectives import all_mean, quotient
from support.executions import EXECUTIONS, lift

# 257 needs nine bits, and bfloat16 has eight: there, it is 256.
WEIGHTS = np.array([100, 57, 0, 100], np.float32)
MIXES = {
    "beside float32": ("bfloat16", "float32"),
    "beside float16": ("bfloat16", "float32", "float16"),
    "alone": ("bfloat16",),
    "float16 alone": ("float16",),
}
BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}


def exact_entries(rng, count):
    """(4, count) small integers whose weighted sums, also partial ones, bfloat16 holds exactly."""
    x = rng.integers(0, 4, size=(4, 200 * count))
    parts = np.cumsum(WEIGHTS[:, None] * x, axis=0)
    every = [*parts, *(parts[-1] - parts), parts[0] + parts[-1] - parts[2]]
    exact = [np.asarray(p.astype(jnp.bfloat16), np.float64) == p for p in every]
    x = x[:, np.logical_and.reduce(exact)]
    return x[:, WEIGHTS @ x > 0][:, :count]


def reduced(grads, weights, execution="vmap", **options):
    tx = js.all_reduce_gradients("replica", **options)
    step = lambda g, w: tx.update(g, tx.init(g), weight=w)[0]  # noqa: E731
    found = lift(step, {"replica": 4}, execution, (False, False))(grads, weights)
    return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("divide_by", ["initial", "active"])
@pytest.mark.parametrize("mix", MIXES)
def test_a_total_that_half_precision_does_not_hold(mix, divide_by):
    """Within the roundings of what is sent, and of the result: far from the 0.4 % of 257."""
    entries = exact_entries(np.random.default_rng(0), 64)
    grads = {name: entries.astype(jnp.dtype(name)) for name in MIXES[mix]}
    for grad in grads.values():
        grad[2] = np.nan  # of weight 0
    wanted = WEIGHTS @ entries.astype(np.float64) / 257 * (0.75 if divide_by == "initial" else 1)
    found = reduced(grads, WEIGHTS, divide_by=divide_by)
    for name, mean in found.items():
        limit = 1.001 * 2 * 2.0 ** -BITS[name]
        np.testing.assert_allclose(mean.astype(np.float64), np.stack([wanted] * 4), rtol=limit)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_in_every_execution(execution):
    entries = exact_entries(np.random.default_rng(1), 16)
    grads = {name: entries.astype(jnp.dtype(name)) for name in ("bfloat16", "float32")}
    for name, mean in reduced(grads, WEIGHTS, execution, divide_by="active").items():
        wanted = np.stack([WEIGHTS @ entries.astype(np.float64) / 257] * 4)
        # Parts are rounded as they are sent, and so is their sum.
        np.testing.assert_allclose(mean.astype(np.float64), wanted, rtol=2 * 2.0 ** -BITS[name])


def test_the_share_of_those_that_are_left_is_not_rounded():
    """Of three replicas one has run out: two thirds, in bfloat16 0.2 % more."""
    tx = js.all_reduce_gradients("replica")
    step = lambda g, w: tx.update({"b": g, "f": f}, tx.init(g), weight=w)[0]["b"]  # noqa: E731
    f = jnp.ones(1)
    sums = np.arange(1, 128, dtype=np.float32)
    grads = np.stack([sums, 0 * sums, np.nan * sums]).astype(jnp.bfloat16)
    found = jax.vmap(step, axis_name="replica")(grads, np.array([1, 1, 0], np.float32))
    wanted = np.asarray((sums / 3).astype(jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(np.asarray(found[0], np.float32), wanted)


@settings(max_examples=10)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 57.0, 128.0, 257.0]), min_size=4, max_size=4),
    st.integers(0, 99),
    st.sampled_from(["initial", "active"]),
)
def test_any_weights(weights, seed, divide_by):
    weights = np.float32(weights)
    values = np.random.default_rng(seed).uniform(1, 2, size=(4, 8))
    grads = {name: values.astype(jnp.dtype(name)) for name in ("bfloat16", "float32")}
    for name, mean in reduced(grads, weights, divide_by=divide_by).items():
        total, share = weights.sum(), np.mean(weights > 0) if divide_by == "initial" else 1
        x = grads[name].astype(np.float64)
        wanted = (weights @ x / total * share) if total else np.zeros(8)
        # Each part, and the sums of two and of all, are rounded on the way; the mean at the end.
        limit = 5 * 2.0 ** -BITS[name]
        np.testing.assert_allclose(mean.astype(np.float64), np.stack([wanted] * 4), rtol=limit)


def test_large_values_do_not_overflow_in_float16():
    """The only replica with data has weight R times the mean, and a value near the largest."""
    grads = {"h": np.float16([[40000.0], [1], [1], [1]])}
    weights = np.array([3, 0, 0, 0], np.float32)
    assert reduced(grads, weights, divide_by="active")["h"].tolist() == [[40000.0]] * 4


def test_float64_keeps_its_precision():
    """Beside float16, where factors are computed before sums are."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        values = np.random.default_rng(0).normal(size=(4, 8))
        weights = np.array([1, 1, 0, 1], np.float32)
        for others in ({}, {"h": np.ones((4, 1), np.float16)}):
            for divide_by, share in (("initial", 3 / 4), ("active", 1)):
                found = reduced({"d": values, **others}, weights, divide_by=divide_by)["d"]
                wanted = np.stack([weights.astype(np.float64) @ values / 3 * share] * 4)
                # Devices add in the order in which they come.
                np.testing.assert_allclose(found, wanted, rtol=1e-14, atol=1e-15)


def test_a_number_of_replicas_that_half_precision_does_not_hold():
    """The plain mean of 257 replicas: their number is 256 in bfloat16."""
    values = np.zeros((257, 1), jnp.bfloat16)
    values[:128] = 1
    mean = jax.vmap(lambda x: all_mean(x, "replica"), axis_name="replica")(values)
    assert float(mean[0, 0]) == float(jnp.bfloat16(128 / 257)) != float(jnp.bfloat16(0.5))


def test_a_quotient_is_rounded_once():
    x = jnp.asarray([1.0, 3, 314], jnp.bfloat16)
    found = quotient(x, jnp.float32(257))
    assert found.dtype == jnp.bfloat16
    wanted = [float(jnp.bfloat16(float(v) / 257)) for v in x]
    assert found.tolist() == wanted
    assert quotient(x, jnp.float32(0)).tolist() == [0, 0, 0]


OPTIONS = {
    "by default": {},
    "active": {"divide_by": "active"},
    "forward": {"order": "forward"},
    "a bucket for each leaf": {"bucket_bytes": 0},
    "parts": {"bucket_bytes": 16, "split_large": True},
    "hook": {"hook": js.hooks.mean()},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_leaf_in_half_precision_gets_the_same_whatever_stands_beside_it(options):
    rng = np.random.default_rng(3)
    values = np.concatenate([np.ones((4, 1)), rng.uniform(1, 2, (4, 40))], axis=1)
    leaves = {
        "b": values.astype(jnp.bfloat16),
        "f": values.astype(np.float32),
        "h": values.astype(np.float16),
    }
    every = ["b", "h", "bf", "fb", "fh", "bh", "bfh"]
    found = {names: reduced({n: leaves[n] for n in names}, WEIGHTS, **options) for names in every}
    share = 1 if options.get("divide_by") == "active" else 0.75
    for name, bits in (("b", 8), ("h", 11)):
        wanted = WEIGHTS @ leaves[name].astype(np.float64) / 257 * share
        for names in every:
            if name in names:
                mean = found[names][name]
                np.testing.assert_array_equal(mean, found[name][name], err_msg=names)
                # Parts are rounded as they are sent, and so is the sum.
                limit = 1.5 * 2.0 ** (1 - bits)
                np.testing.assert_allclose(mean.astype(np.float64)[0], wanted, rtol=limit)
                assert mean[0, 0] == mean.dtype.type(share)


def test_tables_and_windows_beside_a_leaf_in_half_precision():
    """Rows and sums over several calls: neither weights nor the total are rounded."""
    ones = np.ones((4, 3), jnp.bfloat16)

    def mean_of(tx, grads):
        def step(g, w):
            state = tx.init(g)
            for _ in range(2):
                updates, state = tx.update(g, state, weight=w / 2)
            return updates

        return jax.vmap(step, axis_name="replica")(grads, WEIGHTS)

    average = js.all_reduce_gradients("replica", divide_by="active")
    rows = js.all_reduce_rows("replica", tables=["table"], dense=average, divide_by="active")
    collected = js.accumulate(average, every=2)
    for tx in (average, collected):
        for grads in ({"b": ones}, {"b": ones, "f": ones.astype(np.float32)}):
            assert np.all(mean_of(tx, grads)["b"] == 1)

    def with_rows(g, w):
        table = js.RowGradient(jnp.array([1, 4]), g[:2, None] * jnp.ones(2, g.dtype), 6)
        grads = {"b": g, "f": g.astype(jnp.float32), "table": table}
        return rows.update(grads, rows.init(grads), weight=w)[0]

    found = jax.vmap(with_rows, axis_name="replica")(ones, WEIGHTS)
    assert np.all(found["b"] == 1)
    assert np.all(found["table"][:, jnp.array([1, 4])] == 1)


@pytest.mark.parametrize("mix", MIXES)
def test_what_is_sent(mix, mesh_of):
    """One all-reduce per dtype; the weights with the float32 one, or 8 bytes of their own."""
    tx = js.all_reduce_gradients("replica")
    shapes = {name: jax.ShapeDtypeStruct((4, 10), jnp.dtype(name)) for name in MIXES[mix]}
    spec = jax.P("replica")
    step = jax.shard_map(
        lambda g, w: tx.update(g, tx.init(g), weight=w[0])[0],
        mesh=mesh_of({"replica": 4}),
        in_specs=(spec, spec),
        out_specs=spec,
    )
    weights = jax.ShapeDtypeStruct((4,), jnp.float32)
    rows = js.comm_report(jax.jit(step), shapes, weights).select(level="emitted")
    assert {row.collective for row in rows} == {"all-reduce"}
    alone = mix != "beside float32"
    assert sum(row.count for row in rows) == len(MIXES[mix]) + alone
    buffers = sum(10 * jnp.dtype(name).itemsize for name in MIXES[mix])
    assert sum(row.bytes for row in rows) == buffers + 8
