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
from jaxslowmo.checkpoint import Checkpoints
from jaxslowmo.tree import Staged
from support import outer_oracle
from support.oracle import Gossip

RECORDED = json.loads(
    (Path(__file__).parents[2] / "golden" / "peers" / "torchft_streaming.json").read_text()
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
    delay=st.integers(0, 3),
    merge=st.sampled_from([0.0, 0.5, 1.0]),
    shard_state=st.booleans(),
    phases=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_oracle(algorithm, base, fragments, delay, merge, shard_state, phases, seed):
    delay = PERIOD // fragments - 1 if delay == 3 else delay  # the longest
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


# Replicas without data, skipped exchanges, restarts


def spread_slowmo(**options):
    base = js.local_sgd("replica", sync_every=4)
    given = {"fragments": 2, "delay": 2, "merge": 0.25, **options}
    return js.slowmo("replica", base=base, sync_every=PERIOD, **given)


def test_a_replica_without_data_is_left_out_of_what_is_taken():
    """With weights (1, 1, 0, 2) the anchor becomes the weighted mean of update 10."""
    tx = js.local_sgd("replica", sync_every=PERIOD, delay=2)
    weight = jnp.array([1.0, 1.0, 0.0, 2.0])
    start, updates = drawn(1)
    params = tree(np.broadcast_to(start, (REPLICAS, 12)))
    state = jax.vmap(tx.init, axis_name="replica")(params)
    fn = jax.jit(jax.vmap(lambda u, s, p, w: tx.update(u, s, p, weight=w), axis_name="replica"))
    for t in range(PERIOD):
        u, state = fn(tree(updates[t]), state, params, weight)
        params = optax.apply_updates(params, u)
        if t == PERIOD - 3:
            taken = np.average(vector(params), axis=0, weights=weight)
    np.testing.assert_allclose(vector(params), np.broadcast_to(taken, (4, 12)), rtol=1e-5)


@pytest.mark.parametrize("skipped", [4, 5, 6])
def test_a_displacement_that_has_not_travelled_whole_is_dropped(skipped):
    """Fragment 0 is taken in update 4, travels in 5 and 6: without one of these no slow step."""
    tx = spread_slowmo(merge=0.0)
    start, updates = drawn(2)
    params = tree(np.broadcast_to(start, (REPLICAS, 12)))
    state = first = jax.vmap(tx.init, axis_name="replica")(params)
    fn = jax.jit(
        jax.vmap(
            lambda u, s, p, c: tx.update(u, s, p, communicate=c),
            axis_name="replica",
            in_axes=(0, 0, 0, None),
        )
    )
    for t in range(1, PERIOD + 1):
        u, state = fn(tree(updates[t - 1]), state, params, jnp.asarray(t != skipped))
        params = optax.apply_updates(params, u)
    changed = [
        any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, pair), strict=True))
        for pair in zip(first.anchor.values(), state.anchor.values(), strict=True)
    ]
    assert changed == [False, True]


def test_a_run_goes_on_from_every_update_with_the_same_values():
    tx = spread_slowmo()
    start, updates = drawn(3)
    whole = list(run(tx, start, updates, phases=True))
    update = jax.jit(
        jax.vmap(tx.update, axis_name="replica"),
    )
    for t in range(3, 13):
        before, state = whole[t - 1]
        u, _ = update(tree(updates[t]), jax.device_get(state), tree(before))
        after = vector(optax.apply_updates(tree(before), u))
        np.testing.assert_allclose(after, whole[t][0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("at", [4, 5, 6, 11])
def test_a_checkpoint_inside_of_a_delay_goes_on(tmp_path, at, replicas):
    """On as many replicas exactly; on fewer the slow step takes the mean that was taken."""

    def step_on(count, **options):
        mesh = js.virtual_mesh({"replica": count})
        sync = spread_slowmo(merge=0.0, **options)
        return js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=mesh)

    def loss(params, batch):
        return sum(jnp.sum(params[n] * batch[n].mean(0)) for n in params)

    start, updates = drawn(4)
    params, batches = jax.tree.map(jnp.asarray, tree(start)), [tree(u) for u in updates]
    step = step_on(4)
    state = step.init(params)
    for batch in batches[:at]:
        state, _ = step(state, batch)
    fewer = step_on(replicas)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at, state, wait=True)
        resumed = checkpoints.restore(fewer, params).state
    for batch in batches[at : PERIOD if at > 6 else 6]:
        state, _ = step(state, batch)
        resumed, _ = fewer(resumed, batch)
    sync = spread_slowmo(merge=0.0)
    number = 1 if at > 6 else 0
    whole, again = (
        jax.vmap(sync.anchor, axis_name="replica")(run.opt_state[-1], run.params)
        for run in (state, resumed)
    )
    for name in (("a", "b"), ("c", "d"))[number]:
        np.testing.assert_allclose(whole[name][0], again[name][0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "base"),
    [("slowmo", "local_sgd"), ("slowmo", ("push-sum", 2)), ("diloco", None), ("local_sgd", None)],
)
@pytest.mark.parametrize("shard_state", [True, False])
def test_stages_are_cut_alike(algorithm, base, shard_state):
    """Half of each stage's buffer is as a leaf of its own."""
    options = {"fragments": 2, "delay": 3, "merge": 0.25, "shard_state": shard_state}
    start, updates = drawn(6)
    ends = {}
    for form in ("stages", "leaves"):
        # Two stages of 6 elements, and the first and the second half of both.
        def formed(x, form=form):
            x = jnp.asarray(x.reshape(*x.shape[:-1], 2, 6))
            if form == "stages":
                return Staged({"float32": x}, "no layout of a model")
            return {"first": x[..., :3], "second": x[..., 3:]}

        tx = transform(algorithm, bases(base)[0], **options)
        params = formed(np.broadcast_to(start, (REPLICAS, 12)))
        state = jax.vmap(tx.init, axis_name="replica")(params)
        update = jax.jit(jax.vmap(tx.update, axis_name="replica"))
        for u in updates:
            moves, state = update(formed(u), state, params)
            params = optax.apply_updates(params, moves)
        ends[form] = np.concatenate([np.asarray(x) for x in jax.tree.leaves(params)], axis=-1)
    np.testing.assert_allclose(ends["stages"], ends["leaves"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fragments", [1, 2, 3])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_an_update_is_due_where_its_phase_says_so(fragments, delay):
    """Taking what is sent is an event, too: who asks only what is due must not leave it out."""
    tx = js.diloco("replica", sync_every=PERIOD, fragments=fragments, delay=delay)
    for t in range(1, 3 * PERIOD):
        assert bool(tx.due(t)) == bool(tx.phase(t)), t
        assert bool(tx.due(jnp.int32(t))) == bool(tx.phase(t)), t


def test_there_are_few_programs():
    """Three for each fragment and one beside, whatever the delay."""
    tx = js.diloco("replica", sync_every=48, fragments=3, delay=14)
    assert len(tx.phases()) == 3 * 3 + 1


# Division into fragments


def test_fragments_are_whole_layers_of_even_bytes():
    layers = {f"block{i}": {"w": jnp.ones((4, 4)), "b": jnp.ones(4)} for i in range(4)}
    tx = js.diloco("replica", sync_every=4, fragments=2, shard_state=False)
    anchors = list(tx.init(layers).anchor.values())
    assert [[x.shape for x in anchor] for anchor in anchors] == [[(4,), (4, 4)] * 2] * 2


def test_a_function_names_the_fragment_of_each_leaf():
    tx = js.diloco(
        "replica", sync_every=4, fragments=lambda name: int("head" in name), shard_state=False
    )
    with pytest.raises(ValueError, match="known once a state was made"):
        tx.phase(1)
    params = {"head": jnp.ones(3), "stem": jnp.ones(2)}
    assert [[x.size for x in anchor] for anchor in tx.init(params).anchor.values()] == [[2], [3]]
    assert [tx.phase(t) for t in (1, 2, 4)] == [(), ("slow 0",), ("slow 1",)]


BAD = {
    "fragments must divide": ({"fragments": 5}, "multiple of `fragments`"),
    "fragments positive": ({"fragments": 0}, "`fragments` must be an int >= 1, got 0"),
    "fragments no bool": ({"fragments": True, "delay": 1}, "`fragments` must be an int"),
    "delay negative": ({"delay": -1}, "`delay` counts updates and must be an int >= 0, got -1"),
    "delay long": ({"fragments": 2, "delay": 6}, "`delay` must be less than sync_every / frag"),
    "merge": ({"merge": 1.5}, r"`merge` must be a number in \[0, 1\], got 1.5"),
    "merge text": ({"merge": "half"}, "`merge` must be a number"),
    "codec": ({"delay": 1, "codec": js.codecs.bfloat16()}, "with a `delay`"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("make", [js.local_sgd, js.slowmo, js.diloco])
@pytest.mark.filterwarnings("ignore:slowmo without a `base`")
def test_bad_arguments_are_named(make, name):
    options, message = BAD[name]
    with pytest.raises(ValueError, match=f"{make.__name__}: .*{message}"):
        make("replica", sync_every=PERIOD, **options)


def test_more_fragments_than_leaves_are_refused():
    tx = js.diloco("replica", sync_every=PERIOD, fragments=6, shard_state=False)
    with pytest.raises(ValueError, match="more than the leaves of the parameters, got 6 for 2"):
        tx.init({"a": jnp.ones(2), "b": jnp.ones(2)})


def test_slow_steps_without_an_exact_average_are_not_spread():
    base = js.local_sgd("replica", sync_every=4)
    with pytest.raises(ValueError, match="exact_average=False"):
        js.slowmo("replica", base=base, sync_every=PERIOD, exact_average=False, delay=1)
