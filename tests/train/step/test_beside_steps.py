"""Exchanges beside the steps: results as those inside of the programs, and who dispatches what.

Replicas are mapped by vmap here, so nothing waits for a network; tests/cluster has processes.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.train.step import _beside_steps, _step_runner

REPLICAS, UPDATES, PERIOD = 4, 27, 12
PARAMS = {f"layer{i}": {"w": jnp.full((3, 3), 0.3) + jnp.eye(3)} for i in range(4)}


def loss(params, batch):
    x, y = batch
    for layer in params.values():
        x = jnp.tanh(x @ layer["w"])
    return jnp.mean((x - y) ** 2)


def batches(seed=0):
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(2, UPDATES, REPLICAS * 2, 3)).astype(np.float32)
    return list(zip(x, y, strict=True))


def made_step(sync, **options):
    mesh = js.virtual_mesh({"replica": REPLICAS})
    return js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=mesh, mode="host", **options)


def is_possible(mesh, axis_name):
    return True


@pytest.fixture(scope="module")
def beside():
    """Let every step whose transform can do so exchange beside its programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_beside_steps, "runs_beside", is_possible)
        yield


def states(step, weights=None, seed=0):
    """Yield the host's copy of the parameters after each update, and the state itself."""
    state = step.init(PARAMS)
    for t, batch in enumerate(batches(seed)):
        state, _ = step(state, batch, None if weights is None else weights[t])
        yield jax.tree.map(np.array, state.params), state


def syncs(algorithm, base, **options):
    if algorithm == "local_sgd":
        return js.local_sgd("replica", sync_every=PERIOD, **options)
    options["shard_state"] = base != "whole"
    if algorithm == "diloco":
        return js.diloco("replica", sync_every=PERIOD, **options)
    bases = {
        "gossip": lambda: js.sgp("replica", graph=js.topology.ring(REPLICAS)),
        "average": lambda: js.local_sgd("replica", sync_every=5),
    }
    base = bases.get(base, lambda: None)()
    return js.slowmo("replica", base=base, sync_every=PERIOD, momentum=0.5, **options)


@pytest.mark.filterwarnings("ignore:slowmo without a `base`")
@settings(max_examples=4)
@given(
    algorithm=st.sampled_from(["local_sgd", "slowmo", "diloco"]),
    base=st.sampled_from(["gossip", "average", "whole", None]),
    fragments=st.integers(1, 3),
    delay=st.integers(1, 3),
    merge=st.sampled_from([0.0, 0.5]),
    is_weighted=st.booleans(),
    donate=st.booleans(),
)
def test_results_are_those_of_an_exchange_inside_of_the_step(
    algorithm, base, fragments, delay, merge, is_weighted, donate
):
    random = np.random.default_rng(1)
    weights = random.integers(0, 3, (UPDATES, REPLICAS)).astype(np.float32)
    options = {"fragments": fragments, "delay": delay, "merge": merge}

    def trained():
        step = made_step(syncs(algorithm, base, **options), donate=donate)
        return [params for params, _ in states(step, weights if is_weighted else None)]

    inside = trained()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_beside_steps, "runs_beside", is_possible)
        outside = trained()
    for t, (one, other) in enumerate(zip(inside, outside, strict=True)):
        jax.tree.map(
            lambda a, b, t=t: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6, err_msg=t),
            one,
            other,
        )


@pytest.fixture(scope="module")
def sync():
    return js.diloco("replica", sync_every=PERIOD, fragments=2, delay=4)


def test_a_run_goes_on_from_any_state(sync, beside):
    """Whatever is under way is sent again, with equal results."""
    step = made_step(sync, donate=False)
    whole = list(states(step))
    for t in (2, 3, 4, 5, 6, 9):
        other, state = made_step(sync, donate=False), whole[t][1]
        for later, batch in enumerate(batches()[t + 1 : t + 8], start=t + 1):
            state, _ = other(state, batch)
            jax.tree.map(np.testing.assert_array_equal, state.params, whole[later][0])


def test_a_state_saved_beside_goes_on_inside(sync, beside):
    step = made_step(sync, donate=False)
    whole = list(states(step))
    for t in (2, 4, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_beside_steps, "runs_beside", lambda mesh, axis_name: False)
            inside = made_step(sync, donate=False)
        state = whole[t][1]
        for later in range(t + 1, t + 8):
            state, _ = inside(state, batches()[later])
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state.params, whole[t + 7][0]
        )


def test_one_thread_dispatches_exchanges_and_another_the_steps(sync, beside, monkeypatch):
    threads = []
    original = _beside_steps.map_replicas

    def noting(fn, **options):
        def exchange(*args):
            threads.append(threading.current_thread().name)
            return fn(*args)

        return original(exchange, **options)

    monkeypatch.setattr(_beside_steps, "map_replicas", noting)
    step = made_step(sync)
    list(states(step))
    assert threads
    assert all(name.startswith("jaxslowmo-exchange") for name in threads)


def test_a_fragment_is_exchanged_once(sync, beside, monkeypatch):
    started, done = [], []
    original = _beside_steps.BesideSteps._started

    def noting(self, *args):
        started.append(len(done) + 1)
        return original(self, *args)

    monkeypatch.setattr(_beside_steps.BesideSteps, "_started", noting)
    for _ in states(made_step(sync)):
        done.append(None)
    # Taken in updates 2, 8, 14, 20, 26; sent from the next one on.
    assert started == [3, 9, 15, 21, 27]


def test_updates_that_send_run_the_program_of_a_local_update(sync, beside):
    """No step waits for an exchange: neither as an argument, nor by what it donates."""
    step = made_step(sync)
    state = step.init(PARAMS)
    names = set()
    for batch in batches():
        phase = step.next_phase(state)
        state, _ = step(state, batch)
        names.add((phase, step._runner._beside.phase(phase)))
    assert (("send 0",), ()) in names
    assert (("send 1", "slow 1"), ("slow 1",)) in names


def test_no_step_donates_what_an_exchange_reads(sync, beside, monkeypatch):
    read = []
    exchange = _beside_steps.BesideSteps._exchange.func

    def noting(self):
        run = exchange(self)
        return lambda values: read.append(values) or run(values)

    monkeypatch.setattr(_beside_steps.BesideSteps, "_exchange", property(noting))
    *_, (_, state) = states(made_step(sync))
    assert len(read) == 5
    assert not any(x.is_deleted() for x in jax.tree.leaves(read))
    del state


def test_a_step_receives_only_what_has_arrived(sync, beside, monkeypatch):
    ready = []
    run = _step_runner.Runner.run

    def noting(self, task, layout, state, inputs):
        if task.static == ("slow 0",):
            ready.extend(x.is_ready() for x in jax.tree.leaves(state.opt_state[-1].in_flight))
        return run(self, task, layout, state, inputs)

    monkeypatch.setattr(_step_runner.Runner, "run", noting)
    for _ in states(made_step(sync)):
        pass
    assert ready
    assert all(ready)


@pytest.mark.parametrize("bad", [None, 3, 5])
def test_only_finite_around_a_delay_is_the_same_in_all_ways_to_run(bad):
    """It looks at the parameters in each update, so the exchange stays inside of the programs."""
    data = batches()[:14]
    if bad is not None:
        x, y = data[bad]
        data[bad] = x, np.where(np.arange(len(y))[:, None] < 2, np.nan, y).astype(np.float32)
    ends = []
    for mode, possible in (("traced", False), ("host", False), ("host", True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_beside_steps, "runs_beside", lambda *args, possible=possible: possible)
            sync = js.only_finite(
                js.diloco("replica", sync_every=PERIOD, fragments=2, delay=3, shard_state=False)
            )
            mesh = js.virtual_mesh({"replica": REPLICAS})
            step = js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=mesh, mode=mode)
        state = step.init(PARAMS)
        for batch in data:
            state, _ = step(state, batch)
        ends.append(jax.tree.leaves(state.params))
    for leaves in zip(*ends, strict=True):
        for other in leaves[1:]:
            np.testing.assert_allclose(leaves[0], other, rtol=1e-6, atol=1e-6)
