"""Exchanges beside the steps of a host-scheduled run end where those inside of the programs do.

Replicas are mapped by vmap here, so nothing waits for a network, and every step is told that it
can exchange beside its programs; tests/cluster has processes, in which it does.
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
from jaxslowmo.train.step import _overlapped_exchanges

REPLICAS, UPDATES, PERIOD = 4, 27, 12
PARAMS = {f"layer{i}": {"w": jnp.full((3, 3), 0.3) + jnp.eye(3)} for i in range(4)}
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(2, UPDATES, REPLICAS * 2, 3)).astype(np.float32)
BATCHES = list(zip(X, Y, strict=True))
WEIGHTS = RANDOM.integers(0, 3, (UPDATES, REPLICAS)).astype(np.float32)


def loss(params, batch):
    x, y = batch
    for layer in params.values():
        x = jnp.tanh(x @ layer["w"])
    return jnp.mean((x - y) ** 2)


def made_step(sync, *, beside, mode="host", **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_overlapped_exchanges, "can_overlap", lambda mesh, axis_name: beside)
        mesh = js.virtual_mesh({"replica": REPLICAS})
        step = js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=mesh, mode=mode, **options)
        step.init(PARAMS)  # with its first state a step decides where it exchanges
        return step


def states(step, batches=BATCHES, weights=None):
    """Yield the host's copy of the parameters after each update, and the state itself."""
    state = step.init(PARAMS)
    for t, batch in enumerate(batches):
        state, _ = step(state, batch, None if weights is None else weights[t])
        yield jax.tree.map(np.array, state.params), state


def assert_close(found, expected, **close):
    close = close or {"rtol": 2e-6, "atol": 2e-6}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), found, expected)


def syncs(algorithm, base, **options):
    if algorithm == "local_sgd":
        return js.local_sgd("replica", sync_every=PERIOD, **options)
    options["shard_state"] = base != "whole"
    if algorithm == "diloco":
        return js.diloco("replica", sync_every=PERIOD, **options)
    bases = {
        "gossip": js.sgp("replica", graph=js.topology.ring(REPLICAS)),
        "average": js.local_sgd("replica", sync_every=5),
    }
    base = bases.get(base)
    return js.slowmo("replica", base=base, sync_every=PERIOD, momentum=0.5, **options)


@pytest.mark.filterwarnings("ignore:slowmo without a `base`")
@settings(max_examples=2)
@given(
    algorithm=st.sampled_from(["local_sgd", "slowmo", "diloco"]),
    codec=st.sampled_from([None, js.codecs.int8(), js.codecs.int4(error_feedback=False)]),
    base=st.sampled_from(["gossip", "average", "whole", None]),
    fragments=st.integers(1, 3),
    delay=st.integers(1, 3),
    merge=st.sampled_from([0.0, 0.5]),
    is_weighted=st.booleans(),
    donate=st.booleans(),
)
def test_results_are_those_of_an_exchange_inside_of_the_step(
    algorithm, codec, base, fragments, delay, merge, is_weighted, donate
):
    options = {"fragments": fragments, "delay": delay, "merge": merge, "codec": codec}
    runs = (
        states(
            made_step(syncs(algorithm, base, **options), beside=beside, donate=donate),
            weights=WEIGHTS if is_weighted else None,
        )
        for beside in (False, True)
    )
    for (inside, _), (outside, _) in zip(*runs, strict=True):
        assert_close(outside, inside)


def test_exchanges_are_sent_by_a_thread_of_their_own():
    """In the update after what is sent was taken."""
    phases = []
    step = made_step(js.diloco("replica", sync_every=PERIOD, fragments=2, delay=4), beside=True)
    state = step.init(PARAMS)
    for t, batch in enumerate(BATCHES, 1):
        phases.append((t, step.next_phase(state)))
        state, _ = step(state, batch)
    # What is taken in updates 2, 8, 14, 20, 26 is applied four updates later.
    sent = [t for t, phase in phases if any("send" in x for x in phase)]
    assert sent == [t for t in range(3, UPDATES + 1) if (t - 3) % 6 < 4]
    assert {("send 0",), ("send 1", "slow 1")} <= {phase for _, phase in phases}
    assert any(t.name.startswith("jaxslowmo-exchange") for t in threading.enumerate())
