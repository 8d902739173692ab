"""Parameters that travel in 16 bits: what gossip keeps, and what stays finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.executions import gossip_state, lift
from support.transforms import IRREGULAR


def apart(scale: float = 1.0) -> np.ndarray:
    """Return parameters of four replicas that have moved a little from a common start, (4, 9)."""
    rng = np.random.default_rng(0)
    return np.float32(scale * (rng.normal(size=9) + 0.01 * rng.normal(size=(4, 9))))


def moved(tx, params, moves):
    """Return parameters after updates by `moves`, and the last state."""

    def run(x, moves):
        def one(carry, move):
            x, state = carry
            updates, state = tx.update(move, state, x)
            return (optax.apply_updates(x, updates), state), None

        return jax.lax.scan(one, (x, tx.init(x)), moves)[0]

    program = lift(run, {"replica": 4}, "vmap", (False, False))
    found, state = program(jnp.asarray(params), jnp.asarray(moves, jnp.float32))
    return np.asarray(found), state


def test_gossip_keeps_the_sums_over_the_replicas():
    """Of numerators, in flight too, where nodes give and get different weights."""
    y = apart()
    codec = js.codecs.bfloat16(error_feedback=True)
    tx = js.sgp("replica", graph=IRREGULAR, overlap=3, codec=codec)
    found, state = moved(tx, y, np.zeros((4, 20, 9)))
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
    found, state = moved(tx, apart(1e6), np.full((4, 2, 9), 1e5))
    assert np.all(np.isfinite(found))
    if make is js.local_sgd and kept:  # what was beyond comes later
        found = found - np.asarray(state.local["sent"].residual).mean(0)
    if make is not js.diloco:  # its momentum goes on
        assert np.all(np.abs(found.mean(0) / (apart(1e6).mean(0) + 2e5) - 1) < 0.2)
