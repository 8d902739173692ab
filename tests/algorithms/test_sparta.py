"""`js.sparta`: the elements that it draws, weights, recorded runs of EXO Gym."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.algorithms import _sparta
from support.executions import run
from support.golden_peers import cases, parameters
from support.places import drawn

REPLICAS = 4


def exchanged(values, t, weights, **options):
    """The parameters after update `t` by zeros, of the replicas' stacked values and weights."""
    tx = js.sparta("replica", **options)

    def one(x, weight):
        state = tx.init(x)._replace(count=jnp.full([], t - 1, jnp.int32))
        return optax.apply_updates(x, tx.update(jnp.zeros_like(x), state, x, weight=weight)[0])

    return np.asarray(jax.vmap(one, axis_name="replica")(values, np.float32(weights)))


@given(
    size=st.sampled_from([0, 3, 13, 40]),
    block=st.sampled_from([1, 3, 5, 9]),
    t=st.integers(1, 1000),
    seed=st.integers(0, 3),
    weights=st.sampled_from([[1, 1, 1, 1], [2, 0, 1, 1], [0, 0, 0, 0]]),
)
def test_one_element_of_every_block_becomes_the_mean_and_no_other_changes(
    size, block, t, seed, weights
):
    values = np.random.default_rng(size).integers(-8, 8, (REPLICAS, size)).astype(np.float32)
    found = exchanged(values, t, weights, share=1 / block, seed=seed)
    at = drawn(t, size, block=block, seed=seed)
    wanted = values.copy()
    if any(weights):
        wanted[:, at] = np.average(values[:, at], axis=0, weights=weights)
    np.testing.assert_array_equal(found, wanted)
    inside = [x for x in range(0, size, block) if x + block <= size]
    assert all(np.sum((at >= x) & (at < x + block)) == 1 for x in inside)


CASES = cases("sparta.npz")


@pytest.mark.parametrize("case", CASES)
def test_recorded_runs_with_the_places_that_they_drew(case, monkeypatch):
    """Their code draws other places, and leaves of equally many elements have places of their own.

    So the recorded places stand in for ours, by the sizes of the leaves, which all differ.
    """
    meta, arrays = CASES[case]
    masks = {
        x[0, 0].size: x[0].reshape(meta["steps"], -1) for x in parameters(arrays, "mask").values()
    }

    def places(size, count, block, seed):
        del block, seed
        return jnp.where(jnp.asarray(masks[size])[count - 1], jnp.arange(size), size)

    monkeypatch.setattr(_sparta, "_places", places)
    adamw = functools.partial(optax.adamw, weight_decay=0.01)  # the default of torch
    inner = {"SGD": optax.sgd, "AdamW": adamw}[meta["optimizer"]]
    seen, _ = run(
        optax.chain(inner(meta["lr"]), js.sparta("replica", share=meta["p"])),
        {
            name: np.tile(x, (meta["world"], *[1] * x.ndim))
            for name, x in parameters(arrays, "init").items()
        },
        {name: x.swapaxes(0, 1) for name, x in parameters(arrays, "G").items()},
        axes={"replica": meta["world"]},
        execution="vmap",
    )
    for name, wanted in parameters(arrays, "param").items():
        found = np.stack([params[name] for params in seen], 1)
        np.testing.assert_allclose(found, wanted, atol=2e-6, err_msg=name)


def test_devices_inside_a_replica_draw_from_their_parts(mesh_of):
    """And send no more: a sharded leaf is not gathered."""
    mesh = mesh_of({"replica": 2, "fsdp": 2})
    sync = js.sparta("replica", share=0.25)
    step = js.make_train_step(
        lambda params, batch: jnp.sum(params["w"].T @ batch.mean(0)),
        optax.sgd(0.1),
        sync=sync,
        mesh=mesh,
    )
    start = {"w": np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)}
    batch = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
    state = step.init(jax.device_put(start, NamedSharding(mesh, P("fsdp"))))
    own = start["w"] - 0.1 * batch.reshape(2, 2, 8).mean(1)[..., None]
    found = np.asarray(step(state, batch)[0].params["w"])
    parts = own.reshape(2, 2, 24)
    at = drawn(1, 24, block=4)
    parts[..., at] = parts[..., at].mean(0)
    np.testing.assert_allclose(found, parts.reshape(own.shape), rtol=1e-5, atol=1e-6)
    report = js.comm_report(step, state, batch)
    sent = {r.bytes for r in report.select(axis="replica", level="compiled") if r.count}
    assert sent == {4 * len(at)}
