"""DeMo against the paper's equations in NumPy, and against recorded runs of the authors' code."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.fft import dctn, idctn

import jaxslowmo as js
from support.golden_peers import cases, parameters

# The paper's equations


def parts_of(shape, chunk):
    """Yield the indices of the chunks of a leaf, which its last two dimensions are cut into."""
    sides = [next(d for d in range(chunk, 0, -1) if n % d == 0) for n in shape[-2:]]
    lengths = [*[1] * (len(shape) - len(sides)), *sides]
    starts = [range(0, n, length) for n, length in zip(shape, lengths, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(slice(a, a + n) for a, n in zip(corner, lengths, strict=True))


def paper(grads, weights, decay, top_k, chunk):
    """Return what all decode in every update, of gradients `[updates, replicas, ...]`."""
    momentum, decoded = np.zeros(grads.shape[1:]), np.zeros((len(grads), *grads.shape[2:]))
    share = weights * (weights > 0).sum() / weights.sum()
    for result, grad in zip(decoded, grads, strict=True):
        momentum = decay * momentum
        for m, g, w in zip(momentum, grad, share, strict=True):
            m += w * g if w else 0.0
        for part in parts_of(result.shape, chunk):
            total, senders = np.zeros_like(result[part]), np.zeros_like(result[part])
            for m in momentum:
                components = dctn(m[part], norm="ortho")
                smallest = np.argsort(-np.abs(components), axis=None, kind="stable")[top_k:]
                np.put(components, smallest, 0)
                m[part] -= idctn(components, norm="ortho")
                total += components
                senders += np.abs(components) > 1e-9  # not what rounding left of one sent before
            result[part] = idctn(total / np.maximum(senders, 1), norm="ortho")
    return decoded


def decoded(tx, grads, weights=None):
    """Return what `tx` makes of trees of gradients `[updates, replicas, ...]`, and its states."""

    def one(grads, weight):
        extra = {} if weight is None else {"weight": weight}

        def update(state, grads):
            updates, state = tx.update(grads, state, **extra)
            return state, (updates, state)

        return jax.lax.scan(update, tx.init(jax.tree.map(lambda x: x[0], grads)), grads)[1]

    in_axes = (1, None if weights is None else 0)
    return jax.jit(jax.vmap(one, in_axes=in_axes, out_axes=1, axis_name="replica"))(grads, weights)


SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)


@settings(max_examples=5)
@given(
    st.integers(2, 5),
    st.dictionaries(st.sampled_from("abc"), SHAPES, min_size=1),
    st.integers(1, 9),
    st.integers(1, 7),
    st.sampled_from([0.0, 0.5, 0.999]),
    st.data(),
)
def test_the_equations_of_the_paper(replicas, shapes, chunk, top_k, decay, data):
    """Scalars, stacked matrices and axes that no number divides; weights, idle replicas, NaN."""
    rng = np.random.default_rng(0)
    draw = lambda shape: rng.normal(size=(3, replicas, *shape)).astype(np.float32)  # noqa: E731
    grads = {name: draw(shape) for name, shape in shapes.items()}
    weights = data.draw(
        st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=replicas, max_size=replicas)
    )
    weights[0] = 1.0
    poisoned = {name: x.copy() for name, x in grads.items()}
    for x in poisoned.values():
        x[:, np.array(weights) == 0] = np.nan
    tx = js.demo("replica", compression_decay=decay, top_k=top_k, chunk=chunk)
    found, _ = decoded(tx, poisoned, np.float32(weights))
    for name, x in grads.items():
        x = x.reshape(*x.shape, *[1] * (x.ndim == 2))  # scalars are vectors of one
        wanted = paper(np.float64(x), np.array(weights), decay, top_k, chunk)
        for of_replica in np.moveaxis(np.asarray(found[name]), 1, 0):
            assert np.array_equal(of_replica, found[name][:, 0])
            np.testing.assert_allclose(of_replica.reshape(wanted.shape), wanted, atol=2e-5)


def test_what_is_not_finite_passes():
    grads = np.random.default_rng(0).normal(size=(2, 3, 4, 8)).astype(np.float32)
    grads[0, 1, 0, 2] = np.nan
    found, states = decoded(js.demo("replica", top_k=2, chunk=4), grads)
    assert np.isnan(found[0, 0, :, :4]).all()  # its chunk
    assert np.isfinite(found[0, 0, :, 4:]).all()
    assert np.isfinite(found[1]).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(states))


CASES = cases("demo.npz")


def product(params, grads):
    """A loss whose gradients are given."""
    return sum(jnp.vdot(params[name], grads[name][0]) for name in params)


@pytest.mark.parametrize("case", CASES)
def test_recorded_runs(case):
    """Their code scales gradients by the rate before it adds them to the momentum."""
    meta, arrays = CASES[case]
    rates = jnp.asarray(meta["lr"], jnp.float32)
    rate = lambda count: rates[count]  # noqa: E731
    decay, top_k, chunk = (meta[key] for key in ("decay", "top_k", "chunk"))
    reduced = js.chain(
        optax.scale_by_schedule(rate),
        js.demo("replica", compression_decay=decay, top_k=top_k, chunk=chunk),
    )
    grads = {name: x.swapaxes(0, 1) for name, x in parameters(arrays, "G").items()}
    found, states = decoded(reduced, grads)
    for name, wanted in parameters(arrays, "decoded").items():
        np.testing.assert_allclose(found[name], wanted.swapaxes(0, 1), atol=1e-7, err_msg=name)
    kept = sum(np.sum(np.square(x), -1) for x in jax.tree.leaves(states[1].hook))
    deltas = parameters(arrays, "delta").values()
    wanted = sum(np.square(x).reshape(*x.shape[:2], -1).sum(-1) for x in deltas)
    np.testing.assert_allclose(kept, wanted.T, rtol=1e-5)


def test_bytes_on_the_wire():
    params = {"w": np.zeros((128, 192), np.float32), "b": np.zeros(192, np.float32)}
    step = js.make_train_step(
        product,
        optax.sign_sgd(0.1),
        gradients=js.demo("replica", top_k=32, chunk=64),
        mesh=js.virtual_mesh({"replica": 4}),
    )
    batch = jax.tree.map(lambda x: np.zeros((4, *x.shape), x.dtype), params)
    report = js.comm_report(step, step.init(params), batch)
    sent = [(row.collective, row.count, row.bytes) for row in report.rows]
    # Six chunks of 64 x 64 and three of 64; of each 32 components, in 2 + 4 bytes.
    assert set(sent) == {("all-gather", 2, 4 * (6 + 3) * 32 * (2 + 4))}
