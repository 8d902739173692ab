"""DeMo against recorded runs of the authors' code, and what they do not have: weights, NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.golden_peers import cases, parameters


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


def test_weights_are_factors_and_matrices_may_be_stacked():
    """The mean is that without the idle replica, and of each matrix as a leaf of its own."""
    rng = np.random.default_rng(0)
    grads = {k: rng.normal(size=(3, 3, *s)) for k, s in {"m": (2, 8, 6), "s": ()}.items()}
    grads = {name: x.astype(np.float32) for name, x in grads.items()}
    poisoned = {name: x.copy() for name, x in grads.items()}
    for x in poisoned.values():
        x[:, 1] = np.nan
    tx = js.demo("replica", compression_decay=0.9, top_k=2, chunk=4)
    found, _ = decoded(tx, poisoned, np.float32([1, 0, 3]))
    first, second = grads["m"][:, :, 0], grads["m"][:, :, 1]
    apart = {"first": first, "second": second, "s": grads["s"][..., None]}
    for name, x in apart.items():  # shares of the two that have data
        apart[name] = x[:, [0, 2]] * np.float32([0.5, 1.5]).reshape(2, *[1] * (x.ndim - 2))
    wanted = {name: x[:, :1] for name, x in decoded(tx, apart)[0].items()}
    both = np.stack([wanted["first"], wanted["second"]], axis=2)
    np.testing.assert_allclose(found["m"], np.broadcast_to(both, grads["m"].shape), atol=1e-6)
    np.testing.assert_allclose(found["s"], np.repeat(wanted["s"][..., 0], 3, axis=1), atol=1e-6)


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
