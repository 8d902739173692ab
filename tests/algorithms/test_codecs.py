"""Parameters that travel in 16 bits: what is averaged, what a replica keeps, what stays finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.executions import gossip_state, lift
from support.transforms import IRREGULAR

MAKE = {"bfloat16": js.codecs.bfloat16, "float16": js.codecs.float16}
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # largest relative error of rounding


def apart(scale: float = 1.0) -> np.ndarray:
    """Return parameters of four replicas that have moved a little from a common start, (4, 9)."""
    rng = np.random.default_rng(0)
    return np.float32(scale * (rng.normal(size=9) + 0.01 * rng.normal(size=(4, 9))))


def moved(tx, params, steps=1, moves=None, weight=None):
    """Return parameters after updates by `moves`, and the last state."""

    def run(x, moves, weight):
        told = {} if weight is None else {"weight": weight}

        def one(carry, move):
            x, state = carry
            updates, state = tx.update(move, state, x, **told)
            return (optax.apply_updates(x, updates), state), None

        return jax.lax.scan(one, (x, tx.init(x)), moves)[0]

    if moves is None:
        moves = np.zeros((4, steps, *params.shape[1:]), np.float32)
    weight = None if weight is None else np.float32(weight)
    program = lift(run, {"replica": 4}, "vmap", (False,) * 3)
    found, state = program(jnp.asarray(params), moves, weight)
    return np.asarray(found), state


def random_moves(steps, scale):
    return np.float32(scale * np.random.default_rng(1).normal(size=(4, steps, 9)))


# LocalSGD


@pytest.mark.parametrize("name", MAKE)
def test_the_mean_of_the_rounded_parameters(name):
    """With error feedback replicas send how far they have moved: test_few_bits.py."""
    y = apart()
    found, _ = moved(js.local_sgd("replica", sync_every=1, codec=MAKE[name]()), y)
    part = np.float64(y.astype(jnp.dtype(name)))  # a division by 4 rounds nothing
    # Sums of four are rounded three times in 16 bits.
    near = 1.5 * EPS[name] * np.abs(y).max(0)
    assert np.all(np.abs(found - part.mean(0)) <= near)
    np.testing.assert_allclose(found, found[:1].repeat(4, 0), rtol=0, atol=2e-7)


@pytest.mark.parametrize("name", MAKE)
def test_weights(name):
    y, weight = apart(), np.array([1.0, 3.0, 0.0, 2.5])
    tx = js.local_sgd("replica", sync_every=1, codec=MAKE[name]())
    found, _ = moved(tx, y, weight=weight)
    wanted = weight @ y / weight.sum()
    near = 2.5 * EPS[name] * np.abs(y).max(0)
    assert np.all(np.abs(found[2] - wanted) <= near)  # the idle one takes the mean
    assert np.all(np.abs(weight @ found / weight.sum() - wanted) <= near)
    assert np.array_equal(moved(tx, y, weight=np.zeros(4))[0], y)


# Gossip


@pytest.mark.parametrize("overlap", [0, 3])
def test_gossip_keeps_the_sums_over_the_replicas(overlap):
    """Of numerators, in flight too, where nodes give and get different weights."""
    y = apart()
    codec = js.codecs.bfloat16(error_feedback=True)
    tx = js.sgp("replica", graph=IRREGULAR, overlap=overlap, codec=codec)
    found, state = moved(tx, y, steps=20)
    gossip = gossip_state(state)
    held = [(gossip.weight, found), *((a.weight, a.mean) for a in gossip.in_flight)]
    total = sum(np.float64(w)[:, None] * np.float64(x) for w, x in held).sum(0)
    np.testing.assert_allclose(total, np.float64(y).sum(0), rtol=1e-5)
    assert np.ptp(np.float64(gossip.weight)) > 0.1


def test_error_feedback_keeps_the_mean_of_gossip_that_rounding_loses():
    """But in float16 mixtures are rounded, as FairScale rounds them."""
    start, moves = apart(), random_moves(40, 1e-2)
    exact = np.float64(start).mean(0) + np.float64(moves).mean(0).sum(0)

    def drift(name, kept):
        codec = MAKE[name](error_feedback=kept)
        tx = js.sgp("replica", graph=js.topology.ring(4), codec=codec)
        return np.abs(np.float64(moved(tx, start, moves=moves)[0]).mean(0) - exact).mean()

    assert drift("bfloat16", True) < 1e-3 * drift("bfloat16", False)
    assert drift("float16", True) > drift("float16", False)


# Slow steps


GOSSIP, AVERAGE = js.sgp("replica", graph=IRREGULAR), js.local_sgd("replica", sync_every=3)


@pytest.mark.parametrize(
    ("base", "kept", "weight"),
    [(GOSSIP, False, None), (GOSSIP, True, [1.0, 3.0, 0.0, 2.0]), (AVERAGE, True, None)],
)
def test_slow_steps_send_how_far_replicas_have_moved(base, weight, kept):
    """Which is little: 1e-2, and they are at 1."""
    start, moves = np.broadcast_to(apart()[:1], (4, 9)), random_moves(3, 1e-2)
    (exact, plain), (found, coded) = (
        moved(
            js.slowmo("replica", base=base, sync_every=3, shard_state=False, codec=codec),
            start, moves=moves, weight=weight,
        )
        for codec in (None, js.codecs.float16(error_feedback=kept))
    )  # fmt: skip
    np.testing.assert_allclose(found, exact, rtol=0, atol=5e-5)
    assert np.any(found != exact)
    assert np.ptp(found, axis=0).max() < 1e-6
    assert (len(jax.tree.leaves(coded)) == len(jax.tree.leaves(plain))) != kept
    assert all(np.ptp(x, axis=0).max() == 0 for x in jax.tree.leaves(coded.shared["anchor"]))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("make", [js.local_sgd, js.sgp, js.diloco])
def test_numbers_beyond_float16_stay_finite(make, kept):
    options = {} if make is js.sgp else {"sync_every": 1}
    tx = make("replica", codec=js.codecs.float16(error_feedback=kept), **options)
    found, state = moved(tx, apart(1e6), steps=2, moves=np.full((4, 2, 9), 1e5, np.float32))
    assert np.all(np.isfinite(found))
    if make is js.local_sgd and kept:  # what was beyond comes later
        found = found - np.asarray(state.local["sent"].residual).mean(0)
    if make is not js.diloco:  # its momentum goes on
        assert np.all(np.abs(found.mean(0) / (apart(1e6).mean(0) + 2e5) - 1) < 0.2)
