"""The mean over replicas is that of the whole tables, however it is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.executions import EXECUTIONS, lift

REPLICAS, NUM_ROWS, ENTRIES = 4, 12, 6
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


def reduced(axis_name="replica", **options):
    """`(rows, values, ...) -> (mean, state)` of one replica."""
    tx = js.all_reduce_rows(axis_name, **options)

    def step(rows, values, weight=None):
        grads = {"table": js.RowGradient(rows, values, NUM_ROWS)}
        grads, state = tx.update(grads, tx.init({"table": None}), weight=weight)
        return grads["table"], state

    return step


def of_array(axis_name="replica", **options):
    """As `reduced`, with the gradient as an array."""
    tx = js.all_reduce_rows(axis_name, tables=("table",), **options)

    def step(rows, values, weight=None):
        grads = {"table": js.RowGradient(rows, values, NUM_ROWS).to_dense()}
        grads, state = tx.update(grads, tx.init(grads), weight=weight)
        return grads["table"], state

    return step


# What each sends in the first place, and whether some replica has more rows than that.
WAYS = {
    "rows": (reduced(path="rows"), False),
    "table": (reduced(path="dense"), False),
    "capacity": (reduced(path="rows", capacity=5), False),
    "overflow to rows": (reduced(path="rows", capacity=2), True),
    "overflow to the table": (reduced(path="auto", capacity=2), True),
    "array overflows": (of_array(capacity=2), True),
    "array as rows": (of_array(capacity=5, output="rows"), False),
    "as rows": (reduced(output="rows"), False),
    "as rows overflow": (reduced(output="rows", capacity=1), True),
}


def all_ways(weighted):
    def run(rows, values, *weight):
        found = {}
        for name, (step, _) in WAYS.items():
            mean, state = step(rows, values, *weight if weighted else ())
            found[name] = (mean, state)
        return found

    return run


def as_arrays(mean):
    """Per replica as a table; rows must be sorted, each once, padding behind and zero."""
    if not isinstance(mean, js.RowGradient):
        return np.asarray(mean)
    rows, values = np.asarray(mean.rows), np.asarray(mean.values)
    for r, v in zip(rows, values, strict=True):
        real = r[r < NUM_ROWS]
        assert real.tolist() == sorted(set(real.tolist()))
        assert (r[len(real) :] == NUM_ROWS).all()
        assert not v[len(real) :].any()
    return dense_of(rows, values)


def check_all_ways(found, rows, wanted):
    distinct = max(len(set(r[r < NUM_ROWS].tolist())) for r in rows)
    for name, (_, overflows) in WAYS.items():
        mean, state = found[name]
        tables = as_arrays(mean)
        np.testing.assert_allclose(tables, np.broadcast_to(wanted, tables.shape), **CLOSE)
        assert (tables == tables[0]).all()
        assert np.asarray(state.overflows).tolist() == [int(overflows)] * len(rows), name
        if name != "table":
            assert np.asarray(state.needed).tolist() == [distinct] * len(rows), name


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_every_way_gives_the_mean(execution):
    rows, values = entries()
    found = lift(all_ways(False), {"replica": REPLICAS}, execution, (False,) * 2)(rows, values)
    check_all_ways(found, rows, dense_of(rows, values).mean(0))


def test_weights():
    """The second replica has run out: whatever it holds is ignored."""
    rows, values = entries(seed=1)
    weight = np.array([3.0, 0.0, 1.0, 2.0], np.float32)
    tables = dense_of(rows, values)
    wanted = np.einsum("r,r...->...", weight, tables) / weight.sum() * 3 / 4
    values[1] = np.nan
    run = lift(all_ways(True), {"replica": REPLICAS}, "shard_map", (False,) * 3)
    found = run(rows, values, weight)
    # Rows that only it has are there, with zeros; so they are in the dense ones.
    check_all_ways(found, rows, wanted)


def test_weights_divided_by_those_that_are_left():
    rows, values = entries(seed=2)
    weight = np.array([3.0, 0.0, 1.0, 2.0], np.float32)
    wanted = np.einsum("r,r...->...", weight, dense_of(rows, values)) / weight.sum()
    for path in ("rows", "dense"):
        step = jax.jit(jax.vmap(reduced(path=path, divide_by="active"), axis_name="replica"))
        np.testing.assert_allclose(step(rows, values, weight)[0][0], wanted, **CLOSE)
        assert not np.asarray(step(rows, values, 0 * weight)[0]).any()


@pytest.mark.parametrize("check", [True, False])
def test_several_axes_at_once(check):
    """Equal on all replicas by its type too: it may leave shard_map as one copy."""
    rows, values = entries()
    mesh = js.make_mesh({"a": 2, "b": 2})

    def per_device(rows, values):
        outs = [
            reduced(("a", "b"), path="rows", capacity=2),
            reduced(("a", "b"), path="dense"),
            reduced(("a", "b"), output="rows"),
        ]
        outs = [step(rows[0], values[0]) for step in outs]
        return [mean for mean, _ in outs], outs[0][1].overflows

    run = jax.shard_map(
        per_device, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(), check_vma=check
    )
    means, overflows = jax.jit(run)(rows, values)
    assert overflows == 1
    for mean in means:
        table = mean.to_dense() if isinstance(mean, js.RowGradient) else mean
        np.testing.assert_allclose(table, dense_of(rows, values).mean(0), **CLOSE)


@settings(max_examples=7)
@given(
    replicas=st.integers(1, 8),
    num_rows=st.integers(1, 6),
    size=st.integers(0, 7),
    capacity=st.one_of(st.none(), st.integers(1, 4)),
    options=st.sampled_from([{"path": "rows"}, {"path": "auto"}, {"output": "rows"}]),
    tail=st.sampled_from([(), (2,)]),
    seed=st.integers(0, 99),
)
def test_any_sizes(replicas, num_rows, size, capacity, options, tail, seed):
    rows, values = entries(seed, replicas, num_rows, size, tail)
    tx = js.all_reduce_rows("replica", capacity=capacity, **options)

    def step(rows, values):
        grads = [js.RowGradient(rows, values, num_rows)]
        (mean,), state = tx.update(grads, tx.init([None]))
        return mean.to_dense() if options.get("output") else mean, state

    mean, state = jax.jit(jax.vmap(step, axis_name="replica"))(rows, values)
    wanted = dense_of(rows, values, num_rows).mean(0)
    np.testing.assert_allclose(mean, np.broadcast_to(wanted, mean.shape), **CLOSE)
    most = max((len(set(r[r < num_rows].tolist())) for r in rows), default=0)
    overflows = state.overflows[0]
    if overflows:
        assert capacity is not None
        assert most > capacity
    elif state.needed[0]:
        assert capacity is None or most <= capacity


def test_half_precision_is_kept():
    rows = np.zeros((8, 3), np.int32)
    for dtype in (jnp.float16, jnp.bfloat16):
        values = jnp.full((8, 3, 2), 16384.0, dtype)
        step = jax.jit(jax.vmap(reduced(path="rows"), axis_name="replica"))
        mean, _ = step(rows, values)
        assert mean.dtype == dtype
        assert (mean[:, 0] == 3 * 16384).all()  # the sum over replicas is beyond float16


def test_rows_outside_of_the_table_are_counted_and_change_no_other():
    rows, values = entries()
    rows[0, 0], rows[2, 1], rows[2, 2] = -1, NUM_ROWS + 1, -NUM_ROWS
    kept = rows.copy()
    kept[(kept < 0) | (kept > NUM_ROWS)] = NUM_ROWS
    for path in ("rows", "dense"):
        step = jax.jit(jax.vmap(reduced(path=path), axis_name="replica"))
        mean, state = step(rows, values)
        assert (state.invalid == 3).all()
        np.testing.assert_allclose(mean[0], dense_of(kept, values).mean(0), **CLOSE)


def test_other_leaves_go_to_the_dense_transform_with_its_state():
    rows, values = entries()
    bias = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    tx = js.all_reduce_rows(
        "replica",
        tables=("deep/table",),
        dense=optax.chain(js.all_reduce_gradients("replica"), optax.trace(0.5)),
    )

    def step(rows, values, bias):
        table = js.RowGradient(rows, values, NUM_ROWS)
        params = {"deep": {"table": jnp.zeros(table.shape)}, "bias": bias}
        state = tx.init(params)
        for _ in range(2):
            grads, state = tx.update({"deep": {"table": table}, "bias": bias}, state, params)
        return grads, state

    grads, state = jax.jit(jax.vmap(step, axis_name="replica"))(rows, values, bias)
    np.testing.assert_allclose(grads["bias"], np.tile(bias.mean(0) * 1.5, (4, 1)))
    np.testing.assert_allclose(grads["deep"]["table"][0], dense_of(rows, values).mean(0), **CLOSE)
    assert [x.shape for x in jax.tree.leaves(state.dense)][-1] == (4, 2)
    assert not any(x.ndim == 3 for x in jax.tree.leaves(state.dense))
    assert (state.count == 2).all()


def test_without_a_dense_transform_other_leaves_stay_as_they_are():
    tx = js.all_reduce_rows("replica", tables=("table",), capacity=1)
    grads = {"table": jnp.ones((2, 3, 1)), "b": jnp.arange(2.0)}
    out = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="replica"))(grads)
    np.testing.assert_array_equal(out["b"], grads["b"])
    np.testing.assert_array_equal(out["table"], grads["table"])


def test_in_a_training_step(mesh_of):
    """The model and its loss are as they were; the table is named."""

    def loss(params, tokens):
        return jnp.mean((params["table"][tokens] @ params["w"]) ** 2)

    rng = np.random.default_rng(0)
    params = {"table": rng.normal(size=(40, 3)), "w": rng.normal(size=(3, 2))}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    tokens = rng.integers(0, 40, size=(3, 8, 2))
    plain = js.all_reduce_gradients("replica")
    ends = []
    for gradients in (
        plain,
        js.all_reduce_rows("replica", tables=("table",), dense=plain, capacity=3, path="rows"),
    ):
        step = js.make_train_step(
            loss, optax.adam(0.1), gradients=gradients, mesh=mesh_of({"replica": 4})
        )
        state = step.init(params)
        for batch in tokens:
            state, _ = step(state, batch)
        ends.append(state)
    for a, b in zip(*(jax.tree.leaves(s.params) for s in ends), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    rows_state = ends[1].opt_state[0]
    per_replica = [[len(set(b.ravel())) for b in np.split(batch, 4)] for batch in tokens]
    assert rows_state.needed[0] == np.max(per_replica)
    assert rows_state.overflows[0] == sum(max(counts) > 3 for counts in per_replica)
    assert rows_state.overflows[0] > 0


ROWS, VALUES = jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 2, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "`capacity` counts rows and must be an int >= 1"),
        ({"capacity": {"t": 0}, "tables": ("t",)}, r"`capacity\['t'\]` counts rows"),
        ({"capacity": {"x": 3}, "tables": ("t",)}, "`capacity` is given for 'x'"),
        ({"path": "fast"}, '`path` must be "auto", "rows" or "dense"'),
        ({"output": "sparse"}, '`output` must be "dense" or "rows"'),
        ({"path": "dense", "output": "rows"}, '`output="rows"` needs'),
        ({"divide_by": "world"}, '`divide_by` must be "initial" or "active"'),
        ({"tables": "embedding"}, "`tables` must be a sequence of names"),
        ({"axis_name": 3}, "`axis_name` must be the name of a mapped axis"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        js.all_reduce_rows(**{"axis_name": "replica", **options})


@pytest.mark.parametrize(
    ("options", "keywords", "message"),
    [
        ({"axis_name": "nodes"}, {}, "`axis_name` 'nodes' is not a mapped axis"),
        ({"tables": ("emb",)}, {}, "`tables` names 'emb', but the leaves are 'table'"),
        ({"dense": optax.identity()}, {}, "must name every leaf .* missing: 'table'"),
        ({}, {"weight": jnp.ones(2)}, "`weight` must be a real scalar"),
    ],
)
def test_bad_updates_are_refused(options, keywords, message):
    tx = js.all_reduce_rows(**{"axis_name": "replica", **options})

    def step(rows, values):
        grads = {"table": js.RowGradient(rows, values, 4)}
        return tx.update(grads, None, **keywords)[0]

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(jax.vmap(step, axis_name="replica"), ROWS, VALUES)


def test_scaled_rows_and_scalar_tables_are_refused():
    tx = js.all_reduce_rows("replica", tables=("t",))
    for leaf, message in [
        (lambda v: js.RowGradient(v[:, 0], v, 4), "rows of 't' must be integers"),
        (lambda v: v[0, 0], r"the table 't' needs a shape \(num_rows, ...\)"),
        (lambda v: v.astype(int), "int32"),
    ]:
        step = lambda v, leaf=leaf: tx.update({"t": leaf(v)}, tx.init({"t": 0}))[0]  # noqa: E731
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(jax.vmap(step, axis_name="replica"), VALUES)


def test_gradients_that_jax_has_summed_are_refused():
    step = reduced()
    run = jax.shard_map(
        lambda rows, values: step(rows[0], values)[0],
        mesh=js.make_mesh({"replica": 4}),
        in_specs=(P("replica"), P()),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="does not vary over 'replica'"):
        jax.eval_shape(run, ROWS, VALUES[0])
