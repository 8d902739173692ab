"""The host counts updates and gossip rounds itself, after one read of a device's counter."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.train.step import _step_runner, _step_states
from support.exhaustive import sweep
from train.step.problem import BATCHES, PARAMS, RATE, loss

# The counter of updates, which the host reads from the device once and then counts itself


class CountingNumpy:
    """NumPy, but it counts calls of `asarray`, by which the step runner reads device arrays."""

    def __init__(self):
        self.reads = 0

    def asarray(self, *args, **kwargs):
        self.reads += 1
        return np.asarray(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(np, name)


@pytest.mark.parametrize("mode", ["traced", "host"])
def test_a_run_reads_the_counter_once(mode, monkeypatch):
    counting = CountingNumpy()
    monkeypatch.setattr(_step_states, "np", counting)
    step = js.make_train_step(
        loss,
        optax.sgd(RATE),
        sync=js.local_sgd("replica"),
        mesh=js.virtual_mesh({"replica": 2}),
        mode=mode,
    )
    for _ in js.train_loop(step, step.init(PARAMS), BATCHES):
        pass
    assert counting.reads == 1


def test_entries_of_arrays_that_are_gone_are_removed():
    counts = _step_runner.HostCounts()
    kept = [jnp.int32(number) for number in range(3)]
    for number, array in enumerate(kept):
        counts.note(array, number)
    for number in range(1000):
        counts.note(jnp.int32(number), number)
    assert [counts.get(array) for array in kept] == [0, 1, 2]
    assert len(counts._values) <= _step_runner._SMALLEST_ROOM


# Rounds of gossip: each exchange is a round of the graph's rotation, and a skipped one is none


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


def after_update_without_exchange(sync, state, mesh):
    """Return the state after an update of zeros by `sync` alone, with its exchange skipped."""

    def one(params, opt_state):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return sync.update(zeros, opt_state, params, communicate=False)[1]

    after = jax.vmap(one, axis_name="replica")(state.params, state.opt_state[-1])
    return state._replace(opt_state=(*state.opt_state[:2], after))


@pytest.mark.parametrize(
    ("pauses", "name"),
    sweep(
        itertools.product([0, 1, 2], TRANSFORMS),
        lambda pauses, name: pauses == 1 or (pauses, name) == (2, "slowmo over sgp"),
    ),
)
def test_both_modes_take_the_same_phases_after_skipped_exchanges(name, pauses):
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
            state = after_update_without_exchange(sync, state, mesh)
        phases[mode] = []  # of the 6 updates after the pauses
        for _ in range(6):
            phases[mode].append(step.next_phase(state))
            state, _ = step(state, BATCH)
        ends[mode] = np.asarray(state.params["w"])
    assert phases["traced"] == phases["host"]
    np.testing.assert_allclose(ends["host"], ends["traced"], rtol=1e-6)
    if name == "sgp":
        # The update before the pauses was round 0; skipped exchanges are no rounds.
        rounds = [f"round {(1 + t) % GRAPH.num_rounds}" for t in range(6)]
        assert phases["host"] == [(r,) for r in rounds]
