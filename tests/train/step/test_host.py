"""The host counts updates and gossip rounds itself, after one read of a device's counter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

GRAPH = js.topology.directed_exponential(4)
MESH = js.virtual_mesh({"replica": 4})
BATCH = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
GOSSIP = js.sgp("replica", graph=GRAPH)
TRANSFORMS = {
    "sgp": GOSSIP,
    "slowmo over sgp": js.slowmo("replica", base=GOSSIP, sync_every=4),
    "slowmo over sgp inexact": js.slowmo("replica", base=GOSSIP, sync_every=4, exact_average=False),
}


def step_of(sync, mode):
    fn = lambda p, b: (p["w"] * b).sum()  # noqa: E731
    step = js.make_train_step(fn, optax.sgd(0.1), sync=sync, mesh=MESH, mode=mode, donate=False)
    return step, step.init({"w": np.ones(3, np.float32)})


@pytest.mark.parametrize("mode", ["traced", "host"])
def test_a_run_reads_the_counter_once(mode):
    """Those of later states follow from it; of a state that comes from elsewhere it is read."""
    step, state = step_of(js.local_sgd("replica", sync_every=3), mode)
    phases = []
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
    assert reads == []
    fresh = jax.tree.map(jnp.copy, state)
    assert step.next_phase(fresh) == ()
    assert step.next_phase(step(fresh, BATCH)[0]) == ()


def after_update_without_exchange(sync, state):
    """Return the state after an update of zeros by `sync` alone, with its exchange skipped."""

    def one(params, opt_state):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return sync.update(zeros, opt_state, params, communicate=False)[1]

    after = jax.vmap(one, axis_name="replica")(state.params, state.opt_state[-1])
    return state._replace(opt_state=(*state.opt_state[:2], after))


@pytest.mark.parametrize(
    ("pauses", "name"), [(1, "sgp"), (2, "slowmo over sgp"), (1, "slowmo over sgp inexact")]
)
def test_both_modes_take_the_same_phases_after_skipped_exchanges(name, pauses):
    """Each exchange is a round of the graph's rotation, and a skipped one is none."""
    ends, phases, sync = {}, {"traced": [], "host": []}, TRANSFORMS[name]
    for mode, seen in phases.items():
        step, state = step_of(sync, mode)
        state, _ = step(state, BATCH)
        for _ in range(pauses):
            state = after_update_without_exchange(sync, state)
        for _ in range(6):
            seen.append(step.next_phase(state))
            state, _ = step(state, BATCH)
        ends[mode] = np.asarray(state.params["w"])
    assert phases["traced"] == phases["host"]
    np.testing.assert_allclose(ends["host"], ends["traced"], rtol=1e-6)
    if name == "sgp":
        assert phases["host"] == [(f"round {(1 + t) % GRAPH.num_rounds}",) for t in range(6)]
