"""Host-scheduled gossip counts exchanges, as the state does, and not updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

GRAPH = js.topology.directed_exponential(4)
TRANSFORMS = {
    "sgp": lambda: js.sgp("replica", graph=GRAPH),
    "slowmo over sgp": lambda: js.slowmo(
        "replica", base=js.sgp("replica", graph=GRAPH), sync_every=4
    ),
    "slowmo over sgp inexact": lambda: js.slowmo(
        "replica", base=js.sgp("replica", graph=GRAPH), sync_every=4, exact_average=False
    ),
}
BATCH = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def paused(sync, state, mesh):
    """The state after an update by hand that exchanges nothing."""

    def one(params, opt_state):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return sync.update(zeros, opt_state, params, communicate=False)[1]

    after = jax.vmap(one, axis_name="replica")(state.params, state.opt_state[-1])
    return state._replace(opt_state=(*state.opt_state[:2], after))


@pytest.mark.parametrize("pauses", [0, 1, 2])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_run_goes_on_after_skipped_exchanges(name, pauses):
    ends, phases = {}, {}
    for mode in ("traced", "host"):
        sync, mesh = TRANSFORMS[name](), js.virtual_mesh({"replica": 4})
        step = js.make_train_step(
            lambda p, b: (p["w"] * b).sum(), optax.sgd(0.1), sync=sync, mesh=mesh, mode=mode,
            donate=False,
        )  # fmt: skip
        state = step.init({"w": np.ones(3, np.float32)})
        state, _ = step(state, BATCH)
        for _ in range(pauses):
            state = paused(sync, state, mesh)
        phases[mode] = []
        for _ in range(6):
            phases[mode].append(step.next_phase(state))
            state, _ = step(state, BATCH)
        ends[mode] = np.asarray(state.params["w"])
    assert phases["traced"] == phases["host"]
    np.testing.assert_allclose(ends["host"], ends["traced"], rtol=1e-6)
    if name == "sgp":
        rounds = [f"round {(1 + t) % GRAPH.num_rounds}" for t in range(6)]
        assert phases["host"] == [(r,) for r in rounds]
