"""`aggregate` of `js.diloco` against NumPy: radial-directional averages, weights by norms."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.algorithms import NormWeighted

REPLICAS, ROWS, UPDATES = 4, 2, 6
RNG = np.random.default_rng(0)
START = {
    "embed": RNG.normal(size=(4, 3)).astype(np.float32),
    "w": RNG.normal(size=5).astype(np.float32),
    "scale": np.float32(0.5),
}
SIZE = 12 + 5 + 1
BATCHES = RNG.normal(size=(UPDATES, REPLICAS * ROWS, SIZE)).astype(np.float32)
BATCHES[:, :ROWS] *= 6  # the first replica moves further than the others
GRADS = BATCHES.reshape(UPDATES, REPLICAS, ROWS, SIZE).mean(2).astype(np.float64)
ORDER = {"embed": slice(0, 12), "scale": slice(12, 13), "w": slice(13, 18)}
WEIGHTS = np.float32([1, 3, 0, 0.5])
EVERY, RATE = 3, 0.1


def loss(params, batch):
    mean = batch.mean(0)
    parts = [params[name].reshape(-1) @ mean[place] for name, place in ORDER.items()]
    return sum(parts[1:], parts[0])


def flat(tree):
    return np.concatenate([np.reshape(tree[k], (REPLICAS, -1)) for k in ORDER], 1)


def unit(x):
    return x / (np.linalg.norm(x) or 1)


def radial(v, w, where=lambda name: True):
    """(sum w |v| / sum w) unit(sum w unit(v)) of each leaf."""
    out = np.average(v, axis=0, weights=w)
    for name, place in ORDER.items():
        if where(name):
            own = v[:, place]
            length = np.average(np.linalg.norm(own, axis=1), weights=w)
            out[place] = length * unit(sum(a * unit(x) for a, x in zip(w, own, strict=True)))
    return out


def by_norm(v, w, max_ratio, damping):
    norms = np.linalg.norm(v, axis=1)
    ratio = norms / np.median(norms[w > 0])
    kept = np.where(ratio > max_ratio, 0, np.exp(-damping * (ratio - 1)))
    return np.average(v, axis=0, weights=w * kept)


def no_embedding(name):
    return name != "embed"


MERGES = {
    "rda": ("rda", radial),
    "rda, embeddings by the mean": (
        js.rda(where=no_embedding), functools.partial(radial, where=no_embedding)
    ),
    "left out": (
        js.norm_weighted(max_ratio=2), functools.partial(by_norm, max_ratio=2, damping=0)
    ),
    "damped": (
        js.norm_weighted(damping=0.5), functools.partial(by_norm, max_ratio=10, damping=0.5)
    ),
}  # fmt: skip


def oracle(merge, weights=None):
    start = np.concatenate([np.reshape(START[k], -1) for k in ORDER]).astype(np.float64)
    x, anchor, velocity = np.tile(start, (REPLICAS, 1)), start, np.zeros(SIZE)
    w = np.ones(REPLICAS) if weights is None else weights.astype(np.float64)
    for t, grads in enumerate(GRADS, start=1):
        x = x - RATE * np.where(w[:, None] > 0, grads, 0)
        if t % EVERY == 0:
            d = merge(anchor - x, w)
            velocity = 0.9 * velocity + d
            anchor = anchor - 0.7 * (0.9 * velocity + d)
            x = np.tile(anchor, (REPLICAS, 1))
    return x


def step_of(mesh=None, mode="traced", **options):
    return js.make_train_step(
        loss,
        optax.sgd(RATE),
        sync=js.diloco("replica", sync_every=EVERY, **options),
        mesh=js.virtual_mesh({"replica": REPLICAS}) if mesh is None else mesh,
        mode=mode,
    )


def trained(step, weights=None, batches=BATCHES):
    state = step.init(START)
    for batch in batches:
        state, _ = step(state, batch, weights)
    return state


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weights"])
def test_outer_steps_equal_numpy_traced_and_on_the_host(mesh_of, name, weights):
    aggregate, merge = MERGES[name]
    wanted = oracle(merge, weights)
    devices, explicit = jax.devices()[:REPLICAS], (AxisType.Explicit,)
    typed = jax.make_mesh((REPLICAS,), ("replica",), axis_types=explicit, devices=devices)
    on_host = {"mesh": mesh_of({"replica": REPLICAS}), "mode": "host"}
    for options in ({}, on_host, {"mesh": typed}):
        found = trained(step_of(aggregate=aggregate, **options), weights).params
        np.testing.assert_allclose(flat(found), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", MERGES)
def test_a_loop_of_ones_own_equals_the_step(name):
    tx = optax.chain(
        optax.sgd(RATE), js.diloco("replica", sync_every=EVERY, aggregate=MERGES[name][0])
    )
    params = jax.tree.map(lambda x: np.tile(x, (REPLICAS, *[1] * np.ndim(x))), START)

    @functools.partial(jax.vmap, axis_name="replica")
    def run(params, batches):
        def update(run, batch):
            updates, state = tx.update(jax.grad(loss)(run[0], batch), run[1], run[0])
            return (optax.apply_updates(run[0], updates), state), None

        return jax.lax.scan(update, (params, tx.init(params)), batches)[0][0]

    batches = BATCHES.reshape(UPDATES, REPLICAS, ROWS, SIZE).swapaxes(0, 1)
    found = jax.jit(run)(params, batches)
    np.testing.assert_allclose(flat(found), oracle(MERGES[name][1]), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"codec": js.codecs.int8()}, {"fragments": 3}, {"delay": 1}, {"fragments": 3, "delay": 1}],
    ids=str,
)
def test_a_replica_that_is_not_finite_is_left_out_and_goes_on_from_the_anchor(options):
    """However parameters are sent, it is as if it had no weight."""
    bad = BATCHES.copy()
    bad[0, :ROWS] = np.nan
    aggregate = js.norm_weighted(max_ratio=1e6)  # norms of a leaf of one element differ much
    state = trained(step_of(aggregate=aggregate, **options), batches=bad[:3])
    weights = np.float32([0, 1, 1, 1])
    usual = trained(step_of(**options, shard_state=False), weights, batches=BATCHES[:3])
    for name, leaf in state.exchange.shared["anchor"].items():
        wanted = np.asarray(usual.exchange.shared["anchor"][name])
        np.testing.assert_allclose(leaf, wanted, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["rda", "damped"])
def test_norms_are_those_of_whole_leaves_where_devices_share_a_replica(name, mesh_of):
    mesh = mesh_of({"replica": REPLICAS, "fsdp": 2})
    places = {"embed": P("fsdp"), "w": P(), "scale": P()}
    start = {k: jax.device_put(x, NamedSharding(mesh, places[k])) for k, x in START.items()}
    step = step_of(mesh, aggregate=MERGES[name][0])
    state = step.init(start)
    for batch in BATCHES:
        state, _ = step(state, batch)
    np.testing.assert_allclose(flat(state.params), oracle(MERGES[name][1]), rtol=2e-5, atol=2e-5)


def test_equal_displacements_have_their_mean_by_every_rule():
    same = np.tile(BATCHES[:, ROWS : 2 * ROWS], (1, REPLICAS, 1))
    usual = flat(trained(step_of(), batches=same).params)
    for aggregate, _ in MERGES.values():
        found = flat(trained(step_of(aggregate=aggregate), batches=same).params)
        np.testing.assert_allclose(found, usual, rtol=1e-5, atol=1e-5)
    idle = trained(step_of(aggregate="rda"), np.zeros(REPLICAS, np.float32))
    np.testing.assert_array_equal(flat(idle.params)[0], flat(idle.params)[3])
    assert np.all(np.isfinite(flat(idle.params)))


@pytest.mark.parametrize("kind", [np.asarray, jax.numpy.asarray])
def test_the_rule_of_norms_on_the_host_and_in_programs(kind):
    norms = kind(np.float32([1, 2, 3, 31, np.nan, np.inf]))
    found = NormWeighted(10, 0.5).factors(norms)
    wanted = [np.exp(-0.5 * (x / 2.5 - 1)) for x in (1, 2, 3)]
    np.testing.assert_allclose(found, [*wanted, 0, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(NormWeighted().factors(kind(np.zeros(3, np.float32))), [1] * 3)


def test_what_the_rules_send_besides_the_mean(mesh_of):
    mesh, sent = mesh_of({"replica": REPLICAS}), {}
    for name, aggregate in {"mean": "mean", **{k: x for k, (x, _) in MERGES.items()}}.items():
        options = {"shard_state": False} if name == "mean" else {}
        step = step_of(mesh, "host", aggregate=aggregate, **options)
        report = js.comm_report(step, step.init(START), BATCHES[0])
        sent[name] = {
            (r.collective, r.bytes) for r in report.select(level="emitted") if r.kind == "slow"
        }
    # The norms of leaves; one norm from each replica, and the sum of weights.
    assert sent["mean"] == {("all-reduce", 4 * SIZE)}
    assert sent["rda"] == {("all-reduce", 4 * (SIZE + len(START)))}
    assert sent["damped"] == {("all-reduce", 4 * (SIZE + 1)), ("all-gather", 4 * REPLICAS)}


REFUSED = {
    '`aggregate` must be "mean", "rda"': {"aggregate": "median"},
    "`shard_state` does not go with `aggregate`": {"aggregate": "rda", "shard_state": True},
    "`codec` does not go with": {"aggregate": js.rda(), "codec": js.codecs.int8()},
    "`delay` does not go with": {"aggregate": "rda", "delay": 2},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_go_together_is_refused(message):
    with pytest.raises(ValueError, match=message):
        js.diloco("replica", **REFUSED[message])


def test_arguments_of_rules_are_checked():
    with pytest.raises(ValueError, match="`max_ratio` must be a number >= 1"):
        js.norm_weighted(max_ratio=0.5)
    with pytest.raises(ValueError, match="`damping` must be a number >= 0"):
        js.norm_weighted(damping=-1)
    with pytest.raises(ValueError, match="`where` must be a function"):
        js.rda(where="embed")
