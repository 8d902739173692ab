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


# LocalSGD


@pytest.mark.parametrize("name", MAKE)
def test_the_mean_of_the_rounded_parameters(name):
    """With error feedback replicas send how far they have moved: test_few_bits.py."""
    y, weight = apart(), np.array([1.0, 3.0, 0.0, 2.5])
    tx = js.local_sgd("replica", sync_every=1, codec=MAKE[name]())
    found, _ = moved(tx, y, weight=weight)
    wanted = weight @ y / weight.sum()
    near = 2.5 * EPS[name] * np.abs(y).max(0)
    assert np.all(np.abs(found[2] - wanted) <= near)  # the idle one takes the mean
    assert np.all(np.abs(weight @ found / weight.sum() - wanted) <= near)
    assert np.array_equal(moved(tx, y, weight=np.zeros(4))[0], y)
    alike, _ = moved(tx, y)
    # Sums of four are rounded three times in 16 bits, and a division by 4 rounds nothing.
    part = np.float64(y.astype(jnp.dtype(name)))
    assert np.all(np.abs(alike - part.mean(0)) <= 1.5 * EPS[name] * np.abs(y).max(0))
    np.testing.assert_allclose(alike, alike[:1].repeat(4, 0), rtol=0, atol=2e-7)


# Gossip


def test_gossip_keeps_the_sums_over_the_replicas():
    """Of numerators, in flight too, where nodes give and get different weights."""
    y = apart()
    codec = js.codecs.bfloat16(error_feedback=True)
    tx = js.sgp("replica", graph=IRREGULAR, overlap=3, codec=codec)
    found, state = moved(tx, y, steps=20)
    gossip = gossip_state(state)
    held = [(gossip.weight, found), *((a.weight, a.mean) for a in gossip.in_flight)]
    total = sum(np.float64(w)[:, None] * np.float64(x) for w, x in held).sum(0)
    np.testing.assert_allclose(total, np.float64(y).sum(0), rtol=1e-5)
    assert np.ptp(np.float64(gossip.weight)) > 0.1


@pytest.mark.parametrize(
    ("make", "kept"), [(js.local_sgd, True), (js.sgp, False), (js.diloco, True)]
)
def test_numbers_beyond_float16_stay_finite(make, kept):
    options = {} if make is js.sgp else {"sync_every": 1}
    tx = make("replica", codec=js.codecs.float16(error_feedback=kept), **options)
    found, state = moved(tx, apart(1e6), steps=2, moves=np.full((4, 2, 9), 1e5, np.float32))
    assert np.all(np.isfinite(found))
    if make is js.local_sgd and kept:  # what was beyond comes later
        found = found - np.asarray(state.local["sent"].residual).mean(0)
    if make is not js.diloco:  # its momentum goes on
        assert np.all(np.abs(found.mean(0) / (apart(1e6).mean(0) + 2e5) - 1) < 0.2)
