"""`aggregate` of `js.diloco` against NumPy: radial-directional averages, weights by norms."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

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


def trained(step, weights=None, batches=BATCHES, start=START):
    state = step.init(start)
    for batch in batches:
        state, _ = step(state, batch, weights)
    return state


@pytest.mark.parametrize(
    ("name", "weights", "place"),
    [
        ("rda", None, "host"),
        ("rda, embeddings by the mean", WEIGHTS, "virtual"),
        ("left out", WEIGHTS, "typed"),
        ("damped", None, "virtual"),
        ("rda", None, "sharded inside"),  # norms are those of whole leaves
        ("damped", None, "sharded inside"),
    ],
)
def test_outer_steps_equal_numpy(mesh_of, name, weights, place):
    aggregate, merge = MERGES[name]
    axes = {"replica": REPLICAS}
    options = {
        "virtual": {},
        "host": {"mesh": mesh_of(axes), "mode": "host"},
        "typed": {"mesh": mesh_of(axes, explicit=True)},
        "sharded inside": {"mesh": (mesh := mesh_of(axes | {"fsdp": 2}))},
    }[place]
    start = START
    if place == "sharded inside":
        specs = {"embed": P("fsdp"), "w": P(), "scale": P()}
        start = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in START.items()}
    found = trained(step_of(aggregate=aggregate, **options), weights, start=start).params
    np.testing.assert_allclose(flat(found), oracle(merge, weights), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "options", [{"codec": js.codecs.int8()}, {"fragments": 3, "delay": 1}], ids=str
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
