"""The host counts updates and gossip rounds itself, after one read of a device's counter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

BATCH = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
MESH = js.virtual_mesh({"replica": 4})


def step_of(sync, mode):
    fn = lambda p, b: (p["w"][None] * b).sum()  # noqa: E731
    step = js.make_train_step(fn, optax.sgd(0.1), sync=sync, mesh=MESH, mode=mode, donate=False)
    return step, step.init({"w": np.ones(3, np.float32)})


def test_a_run_reads_the_counter_once():
    """Those of later states follow from it; of a state that comes from elsewhere it is read."""
    (step, state), phases = step_of(js.local_sgd("replica", sync_every=3), "host"), []
    for _ in range(6):
        phases.append(step.next_phase(state))
        state, _ = step(state, BATCH)
    assert phases == 2 * [(), (), ("average",)]
    reads, real = [], type(state.step).__array__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(state.step), "__array__", lambda x, *a, **o: reads.append(x) or real(x, *a, **o)
        )
        for _ in js.train_loop(step, state, [BATCH] * 4):
            pass
    assert {x.tolist()[0] for x in reads} == {6}  # by the loop, which counts on from there
    fresh = jax.tree.map(jnp.copy, state)
    assert step.next_phase(fresh) == ()
    assert step.next_phase(step(fresh, BATCH)[0]) == ()
