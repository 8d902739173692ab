"""Outer steps in fragments, late and merged, against an oracle in NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.tree import Staged
from support import outer_oracle
from support.oracle import Gossip

# Against NumPy in float64. Leaves in their order are a vector of 12; of three layers.

SIZES = {"a": 3, "b": 2, "c": 4, "d": 3}
ENDS = np.cumsum([0, *SIZES.values()])
REPLICAS, UPDATES, PERIOD = 4, 27, 12


def fragments_of(tx_fragments):
    """Return the slices of the vector that `make_fragments` makes."""
    bounds = {1: [0, 4], 2: [0, 2, 4], 3: [0, 2, 3, 4], 4: [0, 1, 2, 3, 4]}[tx_fragments]
    return [slice(ENDS[a], ENDS[b]) for a, b in itertools.pairwise(bounds)]


def tree(vector):
    parts = np.split(np.asarray(vector, np.float32), ENDS[1:-1], axis=-1)
    return {name: jnp.asarray(part) for name, part in zip(SIZES, parts, strict=True)}


def vector(tree):
    return np.concatenate([np.asarray(tree[name]) for name in SIZES], axis=-1)


PUSH_SUM = js.topology.from_phone_book([[1, 2], [2], [3], [0]], None)
GRAPHS = {"ring": js.topology.ring(REPLICAS), "push-sum": PUSH_SUM}


def bases(name):
    """Return a base as a transform, and the options of the oracle."""
    if name is None:
        return None, {}
    if name == "local_sgd":
        return js.local_sgd("replica", sync_every=4), {"local_every": 4}
    graph, overlap = GRAPHS[name[0]], name[1]
    gossip = Gossip([js.topology.mixing_matrix(graph, None, k) for k in range(12)], overlap)
    return js.sgp("replica", graph=graph, overlap=overlap), {"gossip": gossip}


def transform(algorithm, base, **options):
    if algorithm.startswith("slowmo"):
        rate = falling if algorithm == "slowmo, rate" else None
        options |= {"momentum": 0.5, "learning_rate": rate}
        return js.slowmo("replica", base=base, sync_every=PERIOD, **options)
    if algorithm == "diloco":
        return js.diloco("replica", sync_every=PERIOD, **options)
    options.pop("shard_state")
    return js.local_sgd("replica", sync_every=PERIOD, **options)


def falling(count):
    return 1 / (1 + count / 8)


OUTER = {
    "slowmo": {"momentum": 0.5},
    "slowmo, rate": {"momentum": 0.5, "inner_rate": falling},
    "diloco": {"momentum": 0.9, "rate": 0.7, "nesterov": True},
    "local_sgd": {},
}


def run(tx, start, updates, *, phases=False, weight=None, skipped=None, tree=tree, vector=vector):
    """Yield the parameters of all replicas, `(replicas, n)`, and the state after each update."""
    params = tree(np.broadcast_to(start, (REPLICAS, len(start))))
    state = jax.vmap(tx.init, axis_name="replica")(params)

    @functools.cache
    def update(phase):
        def one(u, s, p, weight, communicate):
            told = {} if weight is None else {"weight": weight}
            told |= {} if skipped is None else {"communicate": communicate}
            return tx.update(u, s, p, phase=phase, **told)

        return jax.jit(jax.vmap(one, axis_name="replica", in_axes=(0, 0, 0, 0, None)))

    for t, u in enumerate(updates, start=1):
        now = update(tx.phase(t) if phases else None)
        u, state = now(tree(u), state, params, weight, jnp.asarray(t != skipped))
        params = optax.apply_updates(params, u)
        yield vector(params), state


def drawn(seed, size=12):
    random = np.random.default_rng(seed)
    start = random.normal(size=size).astype(np.float32)
    return start, random.normal(size=(UPDATES, REPLICAS, size)).astype(np.float32) / 4


@pytest.mark.filterwarnings("ignore:slowmo without a `base`")
@settings(max_examples=5)
@example("slowmo, rate", "local_sgd", 2, 2, 0.0, False, None, None, False, 0)
@example("slowmo", ("push-sum", 2), 3, 3, 0.5, True, True, [1, 0, 2.5, 3], True, 1)
@given(
    algorithm=st.sampled_from(["slowmo", "slowmo, rate", "diloco", "local_sgd"]),
    base=st.sampled_from(
        [None, "local_sgd", ("ring", 0), ("ring", 1), ("push-sum", 0), ("ring", 2)]
    ),
    fragments=st.sampled_from([1, 2, 3, 4]),
    delay=st.integers(0, 3),
    merge=st.sampled_from([0.0, 0.5, 1.0]),
    shard_state=st.booleans(),
    codec=st.sampled_from([None, True]),
    weight=st.sampled_from([None, [1, 1, 1, 1], [0.5, 0, 3, 1], [0, 0, 2, 0]]),
    phases=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_oracle(
    algorithm, base, fragments, delay, merge, shard_state, codec, weight, phases, seed
):
    """Results agree up to what rounding of displacements to 16 bits loses."""
    delay = PERIOD - 1 if delay == 3 else delay  # the longest, beyond turns of other fragments
    base, of_base = bases(base if algorithm.startswith("slowmo") else None)
    options = {"fragments": fragments, "delay": delay, "merge": merge, "shard_state": shard_state}
    options |= {"codec": js.codecs.float16()} if codec else {}
    tx = transform(algorithm, base, **options)
    weight = None if weight is None else np.float32(weight)
    spread = outer_oracle.Spread(
        PERIOD, fragments_of(fragments), delay, merge, weight, **OUTER[algorithm], **of_base
    )
    start, updates = drawn(seed)
    expected = outer_oracle.run(spread, start, updates)
    near = 1e-2 if codec else 2e-5
    for t, (now, _) in enumerate(run(tx, start, updates, phases=phases, weight=weight)):
        np.testing.assert_allclose(
            now, expected[t], rtol=near, atol=near, err_msg=f"update {t + 1}"
        )


@pytest.mark.parametrize(
    ("interleaved", "shard_state", "delay"), [(True, True, 11), (False, False, 0)]
)
def test_layers_take_turns(interleaved, shard_state, delay):
    """Slices of a stacked leaf, as if they were leaves; its anchor is not cut along the layers."""

    def formed(x):
        x = jnp.asarray(x)
        return {"head": x[..., :4], "layers": x[..., 4:].reshape(*x.shape[:-1], 4, 4)}

    def flat(tree):
        return np.concatenate([x.reshape(REPLICAS, -1) for x in tree.values()], axis=-1)

    fragments = js.layers(3, where=lambda name: name == "layers", interleaved=interleaved)
    tx = js.diloco("replica", sync_every=PERIOD, fragments=fragments, delay=delay, merge=0.25,
                   shard_state=shard_state)  # fmt: skip
    places = 4 + np.arange(16).reshape(4, 4)
    cut = [places[:, 0::2], places[:, 1::2]] if interleaved else [places[:, :2], places[:, 2:]]
    parts = [np.arange(4), *(x.ravel() for x in cut)]
    spread = outer_oracle.Spread(PERIOD, parts, delay, 0.25, **OUTER["diloco"])
    start, updates = drawn(3, 20)
    expected = outer_oracle.run(spread, start, updates)
    found = list(run(tx, start, updates, tree=formed, vector=flat))
    for t, (now, _) in enumerate(found):
        np.testing.assert_allclose(now, expected[t], rtol=2e-5, atol=2e-5, err_msg=f"{t + 1}")
    shape = (REPLICAS, 1, 4) if shard_state else (REPLICAS, 4, 4)
    _, state = found[-1]
    assert state.shared["anchor"]["layers"].shape == shape
    (momentum,) = state.shared["outer"].moments
    assert momentum["layers"].shape == shape


def test_layers_that_cannot_be_cut():
    params = {"head": jnp.ones(2), "layers": jnp.ones((2, 4)), "odd": jnp.ones((2, 3))}
    for where, said in (
        (lambda name: name in ("layers", "odd"), r"odd \[2, 3\]"),
        (lambda name: False, "0 of 3 leaves"),
    ):
        tx = js.local_sgd("replica", sync_every=12, fragments=js.layers(3, where=where))
        with pytest.raises(ValueError, match=said):
            tx.init(params)


# Replicas without data, skipped exchanges, stages


def test_a_displacement_that_has_not_travelled_whole_is_dropped():
    """Fragment 0 is taken in update 4, travels in 5 and 6: without one of these no slow step."""
    base = js.local_sgd("replica", sync_every=4)
    tx = js.slowmo("replica", base=base, sync_every=PERIOD, fragments=2, delay=2)
    start, updates = drawn(2)
    anchors = [state.shared["anchor"] for _, state in run(tx, start, updates[:PERIOD], skipped=6)]
    changed = {name: bool(np.any(anchors[0][name] != anchors[-1][name])) for name in SIZES}
    assert changed == {"a": False, "b": False, "c": True, "d": True}


def test_stages_are_cut_alike():
    """Half of each stage's buffer is as a leaf of its own."""
    options = {"fragments": 2, "delay": 3, "merge": 0.25, "shard_state": False}
    start, updates = drawn(6)
    ends = {}
    for form in ("stages", "leaves"):
        # Two stages of 6 elements, and the first and the second half of both.
        def formed(x, form=form):
            x = jnp.asarray(x.reshape(*x.shape[:-1], 2, 6))
            if form == "stages":
                return Staged({"float32": x}, "no layout of a model")
            return {"first": x[..., :3], "second": x[..., 3:]}

        tx = transform("slowmo", bases(("push-sum", 2))[0], **options)
        params = formed(np.broadcast_to(start, (REPLICAS, 12)))
        state = jax.vmap(tx.init, axis_name="replica")(params)
        update = jax.jit(jax.vmap(tx.update, axis_name="replica"))
        for u in updates:
            moves, state = update(formed(u), state, params)
            params = optax.apply_updates(params, moves)
        ends[form] = np.concatenate([np.asarray(x) for x in jax.tree.leaves(params)], axis=-1)
    np.testing.assert_allclose(ends["stages"], ends["leaves"], rtol=1e-5, atol=1e-6)


@given(fragments=st.sampled_from([1, 2, 3]), delay=st.integers(0, 3), start=st.integers(0, 5))
def test_an_update_is_due_where_its_phase_says_so(fragments, delay, start):
    """Taking what is sent is an event, too: who asks only what is due must not leave it out."""
    schedule = js.every(PERIOD, start=start)
    tx = js.diloco("replica", sync_every=schedule, fragments=fragments, delay=delay)
    for t in range(1, 3 * PERIOD):
        assert bool(tx.due(t)) == bool(tx.phase(t)), t
    counts = np.arange(1, 3 * PERIOD, dtype=np.int32)
    assert np.asarray(tx.due(counts)).tolist() == [bool(tx.phase(int(t))) for t in counts]
    # Three programs for each fragment, whatever the delay, and one beside.
    assert len({*tx.phases()} - {()}) == fragments * {0: 1, 1: 2}.get(delay, 3)
