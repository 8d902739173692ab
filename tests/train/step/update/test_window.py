"""Gradients of several batches as one update, against one batch of them all and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.exhaustive import sweep
from train.step.problem import KINDS, PARAMS

RNG = np.random.default_rng(3)
REPLICAS, ROWS = 4, 4
BATCHES = RNG.normal(size=(7, REPLICAS * ROWS, 8)).astype(np.float32)
STATISTICS = {"mean": np.zeros(8, np.float32), "n": np.int32(0), "keys": jax.random.key(3)}
MESHES = {
    "virtual": lambda: js.virtual_mesh({"replica": REPLICAS}),
    "devices": lambda: js.make_mesh({"replica": REPLICAS}),
    "inner": lambda: js.make_mesh({"replica": REPLICAS, "device": 2}),
    "virtual_inner": lambda: js.virtual_mesh({"replica": REPLICAS, "device": 2}),
}
average = js.all_reduce_gradients("replica")


def loss(params, batch, *, rng, model_state):
    """Dropout by the batch's key and by a stream in the state, and statistics that drift."""
    streams, own = jax.random.split(model_state["keys"])
    noise = jax.random.bernoulli(rng, 0.5, batch.shape) + jax.random.normal(own, batch.shape) / 4
    new = {
        "mean": 0.9 * model_state["mean"] + 0.1 * batch.mean(0),
        "n": model_state["n"] + 1,
        "keys": streams,
    }
    out = jnp.tanh((batch * noise - new["mean"]) @ params["w"] + params["b"])
    value = jnp.mean(out**2)
    return value, ({"largest": jnp.max(jnp.abs(out))}, new)


def made(mesh, **options):
    options = {"gradients": None, "sync": js.local_sgd("replica", sync_every=2), **options}
    return js.make_train_step(loss, optax.sgd(0.3, momentum=0.9), mesh=mesh, **options)


def joined(batches, parts):
    """Batches as one, whose microbatches on every device they are."""
    cut = [np.split(batch, parts) for batch in batches]
    return np.concatenate([part for device in zip(*cut, strict=True) for part in device])


def windowed(step, state, batches, weights=None):
    """One update of several batches."""
    window, seen = None, []
    weights = [None] * len(batches) if weights is None else weights
    for batch, weight in zip(batches[:-1], weights[:-1], strict=True):
        window, metrics = step.collect(state, batch, weight, window=window)
        seen.append(metrics)
    state, metrics = step(state, batches[-1], weights[-1], window=window)
    return state, [*seen, metrics]


def comparable(tree):
    keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if keys(x) else x), tree)


def assert_same(found, expected, **tolerances):
    found, expected = map(comparable, (found, expected))
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, **tolerances), found, expected)


@pytest.mark.parametrize("kind", sweep(MESHES, lambda kind: kind in ("virtual", "inner")))
def test_batches_are_the_microbatches_of_one(kind):
    """With model state, keys and momentum; over two updates, the second of which exchanges."""
    mesh = MESHES[kind]()
    parts = REPLICAS * (2 if "inner" in kind else 1)
    step, whole = made(mesh), made(mesh, accumulate=3)
    state = step.init(PARAMS, model_state=STATISTICS)
    reference = whole.init(PARAMS, model_state=STATISTICS)
    for batches in BATCHES[:3], BATCHES[3:6]:
        state, seen = windowed(step, state, batches)
        reference, metrics = whole(reference, joined(batches, parts))
        for name in metrics:
            mean = np.mean([m[name] for m in seen], axis=0)
            np.testing.assert_allclose(mean, metrics[name], rtol=1e-6, err_msg=name)
    assert_same(state, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", sweep(["virtual", "inner"], lambda kind: kind == "virtual"))
def test_a_window_that_is_applied_is_the_update_with_its_last_batch(kind):
    step = made(MESHES[kind](), order="ready", gradients=average if kind == "virtual" else None)
    state = step.init(PARAMS, model_state=STATISTICS)
    expected, seen = windowed(step, step.init(PARAMS, model_state=STATISTICS), BATCHES[:2])
    window = None
    for batch in BATCHES[:2]:
        window, _ = step.collect(state, batch, window=window)
    state, metrics = step.apply(state, window)
    assert_same(state, expected, rtol=1e-6, atol=1e-7)
    for name in metrics:
        mean = np.mean([m[name] for m in seen], axis=0)
        np.testing.assert_allclose(metrics[name], mean, rtol=1e-6, err_msg=name)


def plain(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2)


def test_weights_are_those_of_the_examples():
    """By hand: a mean over all examples of all batches of all replicas, idle ones left out."""
    active = js.all_reduce_gradients("replica", divide_by="active")
    step = js.make_train_step(plain, optax.sgd(1.0), gradients=active, mesh=MESHES["virtual"]())
    weights = np.float32([[1, 2, 0, 0], [3, 0, 1, 0], [0, 5, 2, 0]])
    batches = BATCHES[:3].copy().reshape(3, REPLICAS, ROWS, 8)
    batches[weights == 0] = np.nan  # whatever an idle replica's batch holds
    state, seen = windowed(step, step.init(PARAMS), batches.reshape(3, -1, 8), weights)
    total = jax.tree.map(np.zeros_like, PARAMS)
    for weight, batch in zip(weights.ravel(), batches.reshape(-1, ROWS, 8), strict=True):
        if weight:
            grads = jax.grad(plain)(PARAMS, batch)
            total = jax.tree.map(lambda t, g, w=weight: t + w * g, total, grads)
    expected = jax.tree.map(lambda p, t: p - t / weights.sum(), PARAMS, total)
    for replica in range(REPLICAS):
        assert_same(jax.tree.map(lambda x, i=replica: x[i], state.params), expected, atol=2e-6)
    np.testing.assert_array_equal([m["weight"] for m in seen], weights)


def test_a_replica_that_is_idle_in_all_batches_keeps_its_model_state():
    step = made(MESHES["virtual"](), model_state="local")
    state = step.init(PARAMS, model_state=STATISTICS)
    before = comparable(state.model_state)
    after = comparable(windowed(step, state, BATCHES[:2], np.float32([[1, 1, 0, 0]] * 2))[0])
    np.testing.assert_array_equal(after.model_state["n"], [2, 2, 0, 0])
    np.testing.assert_array_equal(after.model_state["keys"][2:], before["keys"][2:])
    np.testing.assert_array_equal(after.model_state["mean"][2:], before["mean"][2:])


def test_updates_are_counted_not_batches():
    """Host-scheduled: the second update exchanges, however many batches there are to one."""
    step = made(js.virtual_mesh({"replica": REPLICAS}), mode="host")
    state = step.init(PARAMS, model_state=STATISTICS)
    state, _ = windowed(step, state, BATCHES[:3])
    assert step.next_phase(state) == ("average",)
    assert np.ptp(np.asarray(state.params["w"]), axis=0).max() > 0
    state, _ = windowed(step, state, BATCHES[3:5])
    assert step.next_phase(state) == ()
    np.testing.assert_array_equal(state.step, 2)
    assert np.ptp(np.asarray(state.params["w"]), axis=0).max() == 0


@pytest.mark.parametrize("kind", sweep(["auto", "explicit"], lambda kind: kind == "explicit"))
def test_leaves_sharded_inside_a_replica_stay_so(kind):
    """Accumulated by the window, and in one program beside it."""
    mesh = KINDS[kind]({"replica": 2, "model": 2})
    step, whole = (
        js.make_train_step(
            plain,
            optax.sgd(0.1),
            sync=js.local_sgd("replica", sync_every=1),
            mesh=mesh,
            accumulate=parts,
        )
        for parts in (1, 3)
    )
    params = {"w": np.ones((8, 4), np.float32), "b": np.zeros(4, np.float32)}
    state = step.init(params)
    sharding = NamedSharding(mesh, P("replica", None, "model"))
    state = state._replace(
        params={**state.params, "w": jax.device_put(state.params["w"], sharding)}
    )
    at_once, _ = whole(jax.tree.map(jnp.copy, state), joined(BATCHES[:3], 2))
    window, _ = step.collect(state, BATCHES[0])
    window, _ = step.collect(state, BATCHES[1], window=window)
    assert window.totals["w"].sharding.is_equivalent_to(sharding, 3)
    state, _ = step(state, BATCHES[2], window=window)
    assert_same(state.params, at_once.params, rtol=1e-6, atol=1e-7)
    assert state.params["w"].sharding.is_equivalent_to(sharding, 3)
    grads = [jax.grad(plain)(params, batch) for batch in BATCHES[:3]]
    expected = jax.tree.map(lambda p, *g: p - 0.1 * sum(g) / 3, params, *grads)
    second = jax.tree.map(lambda x: np.asarray(x)[1], state.params)
    assert_same(second, expected, rtol=1e-6, atol=1e-7)


def test_wrong_windows_are_refused():
    step = js.make_train_step(plain, optax.lbfgs(), sync="none", mesh=MESHES["virtual"]())
    state, weight = step.init(PARAMS), np.ones(REPLICAS)
    window, _ = step.collect(state, BATCHES[0])
    other = js.make_train_step(plain, optax.sgd(0.1), sync="none", mesh=MESHES["virtual"]())
    with pytest.raises(ValueError, match=r"that `step\.collect` of this step"):
        other.apply(state, window)
    with pytest.raises(ValueError, match=r"that `step\.collect` of this step"):
        step.apply(state, None)
    with pytest.raises(ValueError, match="`weight` must be given for all batches"):
        step.collect(state, BATCHES[0], weight, window=window)
    with pytest.raises(ValueError, match="`window` must be what"):
        step.collect(state, BATCHES[0], None, ({}, window))
    for shape in (5,), ():
        params = {name: np.zeros(shape, np.float32) for name in PARAMS}
        for call in (
            lambda s: step.collect(s, BATCHES[0], window=window),
            lambda s: step(s, BATCHES[0], window=window),
            lambda s: step.apply(s, window),
        ):
            with pytest.raises(ValueError, match=r"`window` must hold gradients .* of leaf '\w+'"):
                call(step.init(params))
    with pytest.raises(ValueError, match=r"of leaf 'z' `state` has shape .* the window none of"):
        step.apply(step.init({**PARAMS, "z": np.zeros(2)}), window)
    with pytest.raises(ValueError, match="batches of a window of gradients are gone"):
        step.apply(state, window)
    again, _ = step.collect(state, BATCHES[1], window=window)
    with pytest.raises(ValueError, match="`window` was given to a step before"):
        step(state, BATCHES[0], window=window)
    assert np.all(np.asarray(again.count) == 2)


def sent_by(fn, *arguments):
    """(axis, collective, count, bytes) of what a function sends."""
    rows = js.comm_report(fn, *arguments).select(level="emitted")
    return {(row.axis, row.collective, row.count, row.bytes) for row in rows}


def test_a_window_is_reduced_once():
    """As `js.comm_report` tells: nothing between replicas in a batch that is only collected."""
    size = sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    for axes in {"replica": 4}, {"replica": 4, "device": 2}:
        step = js.make_train_step(
            plain,
            optax.sgd(0.1),
            gradients=js.all_reduce_gradients(tuple(axes)),
            mesh=js.make_mesh(axes),
        )
        state = step.init(PARAMS)
        window, _ = step.collect(state, BATCHES[0])
        collected = sent_by(step.collect, state, BATCHES[0])
        updated = {(",".join(axes), "all-reduce", 1, size)}
        assert collected == ({("device", "all-reduce", 1, 4)} if "device" in axes else set())
        assert sent_by(step.apply, state, window) == updated
        last = sent_by(lambda s, b, w, step=step: step(s, b, window=w), state, BATCHES[0], window)
        assert last == collected | updated


def test_a_window_is_used_up():
    """Its gradients are let go of where the step donates, and stay where it does not."""
    for donate in True, False:
        step = js.make_train_step(
            plain, optax.sgd(0.1), gradients=average, mesh=MESHES["virtual"](), donate=donate
        )
        state = step.init(PARAMS)
        window, _ = step.collect(state, BATCHES[0])
        step.apply(state, window)
        assert all(x.is_deleted() == donate for x in jax.tree.leaves(window.totals))
        if donate:
            with pytest.raises(ValueError, match="`window` was given to a step before"):
                step.apply(step.init(PARAMS), window)


@pytest.mark.parametrize("dtype", sweep(["bfloat16", "float16"], lambda dtype: "b" in dtype))
def test_totals_of_half_precision_are_float32(dtype):
    """A sum of 600 ones would stop at 256 in bfloat16, at 2048 their product with 8 in float16."""
    step = js.make_train_step(
        lambda params, batch: jnp.mean(batch * 8) * params["w"],
        optax.sgd(1.0),
        gradients=average,
        mesh=js.virtual_mesh({"replica": 2}),
    )
    state = step.init({"w": np.zeros((), dtype)})
    window, batch = None, jnp.ones(2, dtype)
    for _ in range(600):
        window, _ = step.collect(state, batch, window=window)
    assert window.totals["w"].dtype == np.float32
    np.testing.assert_array_equal(window.totals["w"], 4800)
    state, _ = step.apply(state, window)
    assert state.params["w"].dtype == dtype
    np.testing.assert_array_equal(np.float32(state.params["w"]), -8)
