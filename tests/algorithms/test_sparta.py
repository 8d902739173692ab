"""`js.sparta`: the elements that it draws, weights, recorded runs of EXO Gym, and refusals."""

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


def exchanged(values, t=1, weight=None, **options):
    """The parameters after update `t` by zeros, of the replicas' stacked values."""
    tx = js.sparta("replica", **options)

    def one(x, weight):
        state = tx.init(x)._replace(count=jnp.full([], t - 1, jnp.int32))
        extra = {} if weight is None else {"weight": weight}
        return optax.apply_updates(x, tx.update(jnp.zeros_like(x), state, x, **extra)[0])

    return np.asarray(jax.vmap(one, axis_name="replica")(values, weight))


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 1000), st.integers(0, 3))
def test_one_element_of_every_block_becomes_the_mean_and_no_other_changes(size, block, t, seed):
    values = np.random.default_rng(size).integers(-8, 8, (REPLICAS, size)).astype(np.float32)
    found = exchanged(values, t, share=1 / block, seed=seed)
    at = drawn(t, size, block=block, seed=seed)
    wanted = values.copy()
    wanted[:, at] = values[:, at].mean(0)
    np.testing.assert_array_equal(found, wanted)
    inside = [x for x in range(0, size, block) if x + block <= size]
    assert all(np.sum((at >= x) & (at < x + block)) == 1 for x in inside)


def test_all_elements_are_drawn_equally_often_also_at_the_end_of_a_leaf():
    count, size, block = 4000, 13, 5
    places = np.concatenate([drawn(t, size, block=block) for t in range(1, count + 1)])
    times = np.bincount(places, minlength=size)
    # Six deviations of a binomial distribution of probability 1 / 5.
    assert np.all(np.abs(times - count / block) < 6 * np.sqrt(count * 0.16))


def test_a_share_of_one_averages_all_and_a_small_leaf_is_drawn_as_rarely():
    values = np.random.default_rng(0).normal(size=(REPLICAS, 7)).astype(np.float32)
    found = exchanged(values, share=1.0)
    np.testing.assert_allclose(found, np.tile(values.mean(0), (REPLICAS, 1)), atol=1e-6)
    drawn_at = [t for t in range(1, 200) if np.ptp(exchanged(values[:, 0], t, share=0.1)) < 1e-6]
    assert 5 <= len(drawn_at) <= 40


def test_weights_count_and_an_idle_replica_follows():
    values = np.random.default_rng(0).normal(size=(REPLICAS, 30)).astype(np.float32)
    weight = np.float32([1, 0, 3, 0.5])
    at = drawn(6, 30, block=3)
    found = exchanged(values, 6, weight, share=1 / 3)
    mean = np.average(values, axis=0, weights=weight)
    np.testing.assert_allclose(found[:, at], np.tile(mean[at], (REPLICAS, 1)), rtol=1e-5)
    idle = exchanged(values, 6, 0 * weight, share=1 / 3)
    np.testing.assert_array_equal(idle, values)


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


@pytest.mark.parametrize("mode", ["traced", "host"])
def test_devices_inside_a_replica_draw_from_their_parts(mode, mesh_of):
    """And send no more: a sharded leaf is not gathered."""
    mesh = mesh_of({"replica": 2, "fsdp": 2})
    sync = js.sparta("replica", share=0.25)
    step = js.make_train_step(
        lambda params, batch: jnp.sum(params["w"].T @ batch.mean(0)),
        optax.sgd(0.1),
        sync=sync,
        mesh=mesh,
        mode=mode,
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


BAD = {
    r"`share` must be a number in \(0, 1\], got 0": {"share": 0},
    r"`share` must be a number in \(0, 1\], got 1.5": {"share": 1.5},
    "`seed` must be an int >= 0": {"seed": -1},
    "`sync_every` counts updates": {"sync_every": 0},
    "parameters themselves are sent": {"codec": js.codecs.int8()},
    "`codec` must have no error feedback": {"codec": js.codecs.float16(error_feedback=True)},
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_refused_at_construction(message):
    with pytest.raises(ValueError, match=message):
        js.sparta("replica", **BAD[message])
