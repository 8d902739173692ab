"""Outer steps in fragments, late and merged: torchft's recorded runs, and an oracle in NumPy."""

import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from support import outer_oracle
from support.oracle import Gossip

RECORDED = json.loads(
    (Path(__file__).parents[1] / "golden" / "peers" / "torchft_streaming.json").read_text()
)["cases"]


@pytest.mark.parametrize("case", RECORDED, ids=lambda c: f"delay {c['delay']} merge {c['alpha']}")
@pytest.mark.parametrize("shard_state", [False, True])
def test_torchft_recorded_runs(case, shard_state):
    tx = js.diloco(
        "replica",
        sync_every=case["sync_every"],
        outer_optimizer=optax.sgd(case["outer_learning_rate"]),
        fragments=case["fragments"],
        delay=case["delay"],
        merge=case["alpha"],
        shard_state=shard_state,
    )
    params = {name: jnp.full((2, 1), case["start"]) for name in "ab"}
    state = jax.vmap(tx.init, axis_name="replica")(params)
    update = jax.jit(jax.vmap(tx.update, axis_name="replica"))
    move = -case["inner_learning_rate"] * case["gradient"]
    for t in range(1, len(case["local"])):
        u, state = update(jax.tree.map(lambda x: jnp.full_like(x, move), params), state, params)
        params = optax.apply_updates(params, u)
        for replica in range(2):
            assert [float(params[name][replica, 0]) for name in "ab"] == case["local"][str(t)]
        if str(t) in case["global"]:
            whole = jax.vmap(tx.anchor, axis_name="replica")(state, params)
            assert [float(whole[name][0, 0]) for name in "ab"] == case["global"][str(t)]


# Against NumPy in float64. Leaves in their order are a vector of 12; of three layers.

SIZES = {"a": 3, "b": 2, "c": 4, "d": 3}
ENDS = np.cumsum([0, *SIZES.values()])
REPLICAS, UPDATES, PERIOD = 4, 27, 12


def fragments_of(tx_fragments):
    """The slices of the vector that `divided` makes."""
    bounds = {1: [0, 4], 2: [0, 2, 4], 3: [0, 2, 3, 4], 4: [0, 1, 2, 3, 4]}[tx_fragments]
    return [slice(ENDS[a], ENDS[b]) for a, b in itertools.pairwise(bounds)]


def tree(vector):
    parts = np.split(np.asarray(vector, np.float32), ENDS[1:-1], axis=-1)
    return {name: jnp.asarray(part) for name, part in zip(SIZES, parts, strict=True)}


def vector(tree):
    return np.concatenate([np.asarray(tree[name]) for name in SIZES], axis=-1)


def ring_book():
    book = [[(i + 1) % REPLICAS] for i in range(REPLICAS)]
    book[0].append(2)
    return js.topology.from_phone_book(book, None)


GRAPHS = {"ring": lambda: js.topology.ring(REPLICAS), "push-sum": ring_book}


def bases(name):
    """A base as a transform, and the options of the oracle."""
    if name is None:
        return None, {}
    if name == "local_sgd":
        return js.local_sgd("replica", sync_every=4), {"local_every": 4}
    graph, overlap = name
    made = GRAPHS[graph]()
    matrices = [js.topology.mixing_matrix(made, None, k) for k in range(12)]
    gossip = Gossip([np.asarray(m, np.float64) for m in matrices], overlap)
    return js.sgp("replica", graph=made, overlap=overlap), {"gossip": gossip}


def transform(algorithm, base, **options):
    if algorithm == "slowmo":
        return js.slowmo("replica", base=base, momentum=0.5, sync_every=PERIOD, **options)
    if algorithm == "diloco":
        return js.diloco("replica", sync_every=PERIOD, **options)
    options.pop("shard_state")
    return js.local_sgd("replica", sync_every=PERIOD, **options)


OUTER = {
    "slowmo": {"momentum": 0.5},
    "diloco": {"momentum": 0.9, "rate": 0.7, "nesterov": True},
    "local_sgd": {},
}


def run(tx, start, updates, *, phases):
    params = tree(np.broadcast_to(start, (REPLICAS, len(start))))
    state = jax.vmap(tx.init, axis_name="replica")(params)

    @functools.cache
    def update(phase):
        fn = functools.partial(tx.update, phase=phase)
        return jax.jit(jax.vmap(fn, axis_name="replica"))

    for t, u in enumerate(updates, start=1):
        now = update(tx.phase(t) if phases else None)
        u, state = now(tree(u), state, params)
        params = optax.apply_updates(params, u)
        yield vector(params), state


BASES = [None, "local_sgd", ("ring", 0), ("ring", 1), ("ring", 2), ("push-sum", 0), ("push-sum", 2)]


def drawn(seed):
    random = np.random.default_rng(seed)
    start = random.normal(size=12).astype(np.float32)
    return start, random.normal(size=(UPDATES, REPLICAS, 12)).astype(np.float32) / 4


@pytest.mark.filterwarnings("ignore:slowmo without a `base`")
@given(
    algorithm=st.sampled_from(["slowmo", "slowmo", "diloco", "local_sgd"]),
    base=st.sampled_from(
        [None, "local_sgd", ("ring", 0), ("ring", 1), ("push-sum", 0), ("ring", 2)]
    ),
    fragments=st.sampled_from([1, 2, 3, 4]),
    delay=st.integers(0, 2),
    merge=st.sampled_from([0.0, 0.5, 1.0]),
    shard_state=st.booleans(),
    phases=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_oracle(algorithm, base, fragments, delay, merge, shard_state, phases, seed):
    base, of_base = bases(base if algorithm == "slowmo" else None)
    options = {"fragments": fragments, "delay": delay, "merge": merge, "shard_state": shard_state}
    tx = transform(algorithm, base, **options)
    spread = outer_oracle.Spread(
        PERIOD,
        fragments_of(fragments),
        delay,
        merge,
        **OUTER[algorithm],
        **of_base,
    )
    start, updates = drawn(seed)
    expected = outer_oracle.run(spread, start, updates)
    for t, (now, _) in enumerate(run(tx, start, updates, phases=phases)):
        np.testing.assert_allclose(
            now, expected[t], rtol=2e-5, atol=2e-5, err_msg=f"update {t + 1}"
        )
