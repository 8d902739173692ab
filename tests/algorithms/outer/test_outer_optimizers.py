"""Outer optimizers do what plain optax does by hand; where their state is whole, and where not."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.transform import share_of_whole
from support.layered import assert_close

REPLICAS, EVERY, UPDATES = 2, 2, 6
RNG = np.random.default_rng(0)
SHAPES = {"bias": (3,), "head": (3, 2), "w": (4, 3)}
PARAMS = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
STACKED = {name: np.stack([x] * REPLICAS) for name, x in PARAMS.items()}
STEPS = [
    {name: RNG.normal(size=(REPLICAS, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
    for _ in range(UPDATES)
]


def no_bias(tree):
    named = jax.tree_util.tree_map_with_path
    return named(lambda path, _: "bias" not in jax.tree_util.keystr(path), tree)


ELEMENT_WISE = {
    "sgd": lambda: optax.sgd(0.7, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(optax.linear_schedule(0.1, 0.0, 3), weight_decay=0.1),
    "by label": lambda: optax.partition({True: optax.adam(0.1), False: optax.sgd(0.7)}, no_bias),
    "slow momentum": lambda: js.slow_momentum(0.5),
    "outer nesterov": lambda: js.algorithms.outer_nesterov(0.6, 0.8),
}
MIXING = {
    "lamb": lambda: optax.lamb(0.1),
}
OPTIMIZERS = ELEMENT_WISE | MIXING


def by_hand(optimizer, parts):
    """Return the parameters after the run; each of `parts` has its slow steps at its own times."""
    params, anchor = {n: x.copy() for n, x in STACKED.items()}, dict(PARAMS)
    states = [optimizer.init({n: PARAMS[n] for n in part}) for part in parts]
    for t, step in enumerate(STEPS, start=1):
        params = {name: x + step[name] for name, x in params.items()}
        for number, part in enumerate(parts):
            if (t - (number + 1) * EVERY // len(parts)) % EVERY:
                continue
            old = {name: anchor[name] for name in part}
            displacement = {name: x - params[name].mean(0) for name, x in old.items()}
            updates, states[number] = optimizer.update(displacement, states[number], old)
            for name in part:
                anchor[name] = old[name] + updates[name]
                params[name] = np.stack([anchor[name]] * REPLICAS)
    return params


def run(sync):
    params = STACKED
    state = jax.vmap(sync.init, axis_name="replica")(params)
    update = jax.jit(jax.vmap(sync.update, axis_name="replica"))
    for step in STEPS:
        updates, state = update(step, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params, state


def diloco(name, **options):
    return js.diloco("replica", sync_every=EVERY, outer_optimizer=OPTIMIZERS[name](), **options)


@pytest.mark.parametrize(
    ("name", "shard_state", "count"),
    [
        ("adamw", True, 2),
        ("by label", None, 2),
        ("slow momentum", True, 1),
        ("outer nesterov", None, 2),
        ("lamb", None, 1),
    ],
)
def test_it_is_what_the_optimizer_does_on_the_leaves(name, shard_state, count):
    parts = [["bias", "head"], ["w"]] if count == 2 else [["bias", "head", "w"]]
    fragments = (lambda leaf: int(leaf == "w")) if len(parts) > 1 else 1
    params, state = run(diloco(name, shard_state=shard_state, fragments=fragments))
    assert_close(params, by_hand(OPTIMIZERS[name](), parts), 1e-4)
    shape = (REPLICAS, 2, 3) if shard_state else (REPLICAS, 4, 3)
    assert state.shared["anchor"]["w"].shape == shape
    assert state.shared["anchor"]["bias"].shape == (REPLICAS, 3)  # 2 does not divide it


def test_a_block_of_the_shape_of_another_leaf_is_none_that_stays_whole():
    """Half of "a" has the shape of "b", and both are cut."""
    params = {"a": np.zeros((8, 4), np.float32), "b": np.zeros((4, 4), np.float32)}
    stacked = jax.tree.map(lambda x: np.stack([x, x]), params)
    tx = js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = jax.vmap(tx.init, axis_name="replica")(stacked)
    assert jax.tree.map(np.shape, state.shared["anchor"]) == {"a": (2, 4, 4), "b": (2, 2, 4)}
    assert share_of_whole(state.shared, stacked) == 0


LAYOUTS = {"bias": P(), "head": P("fsdp"), "w": P(None, "fsdp")}
OUTER = {"lamb": MIXING["lamb"], "muon": lambda: optax.contrib.muon(0.1)}


@pytest.mark.parametrize(("name", "fragments"), [("lamb", 2), ("muon", 1)])
def test_in_a_step_any_of_optax_runs_on_the_sharded_anchor(name, fragments):
    """It sees whole arrays, which the compiler shards over replicas and inside of them."""
    params = {n: RNG.normal(size=s).astype(np.float32) for n, s in
              {"bias": (6,), "head": (8, 6), "w": (6, 8)}.items()}  # fmt: skip
    batches = RNG.normal(size=(UPDATES, 8, 6)).astype(np.float32)

    def loss(params, batch):
        found = jnp.tanh(batch @ params["w"]) @ params["head"] + params["bias"][None]
        return jnp.mean((found - batch) ** 2)

    ends, mesh = [], js.make_mesh({"replica": REPLICAS, "fsdp": 4})
    for on in mesh, js.virtual_mesh({"replica": REPLICAS}):
        outer = OUTER[name]()
        sync = js.diloco("replica", sync_every=2, outer_optimizer=outer, fragments=fragments)
        step = js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=on)
        start = params
        if on is mesh:
            lies = {n: NamedSharding(mesh, spec) for n, spec in LAYOUTS.items()}
            start = jax.device_put(params, lies)
        state = step.init(start)
        for batch in batches:
            state, _ = step(state, batch)
        ends.append(state)
    assert_close(ends[0].params, ends[1].params, 1e-5)
    assert_close(ends[0].exchange.shared["anchor"], ends[1].exchange.shared["anchor"], 1e-5)
    like = [x for x in jax.tree.leaves(ends[0].exchange.shared) if x.shape in ((8, 6), (6, 8))]
    assert len(like) > 2
    for x in like:
        named = {n for e in x.sharding.spec for n in ([e] if isinstance(e, str) else e or ())}
        assert named == {"replica", "fsdp"}


def test_outer_nesterov_begins_as_an_average():
    """Numbers of the docstring, in float64."""
    rate, momentum, rng = 0.4, 0.5, np.random.default_rng(1)
    ours = js.algorithms.outer_nesterov(rate, momentum)
    state, trace = ours.init(jnp.zeros(3)), np.zeros(3)
    for k in range(40):
        away = rng.normal(size=3).astype(np.float32)
        share = min(1.0, k / (0.9 * (k + 3)))
        trace = share * momentum * trace + away
        expected = -(1 + share * (rate - 1)) * (share * momentum * trace + away)
        updates, state = ours.update(jnp.asarray(away), state)
        np.testing.assert_allclose(updates, expected, rtol=1e-5, atol=1e-6)
        if k == 0:
            np.testing.assert_array_equal(updates, -away)


def test_the_published_optimizer_is_the_default_and_says_once_for_which_runs_another_is_better(
    caplog,
):
    js.algorithms.published_outer_optimizer.cache_clear()
    default = [js.diloco("replica", sync_every=EVERY) for _ in range(3)]
    diloco("sgd")
    assert [record.name for record in caplog.records] == ["jaxslowmo"]
    assert "js.algorithms.outer_nesterov()" in caplog.text
    assert_close(run(default[0])[0], run(diloco("sgd", shard_state=True))[0], 0)
