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
from support.layered import assert_close, language_model, tokens

REPLICAS, EVERY, UPDATES = 2, 2, 6
RNG = np.random.default_rng(0)
SHAPES = {"bias": (3,), "head": (3, 2), "w": (4, 3)}
PARAMS = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
STACKED = {name: np.stack([x] * REPLICAS) for name, x in PARAMS.items()}
STEPS = [
    {name: RNG.normal(size=(REPLICAS, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
    for _ in range(UPDATES)
]
BASE = js.local_sgd("replica", sync_every=2)


def no_bias(tree):
    named = jax.tree_util.tree_map_with_path
    return named(lambda path, _: "bias" not in jax.tree_util.keystr(path), tree)


ELEMENT_WISE = {
    "sgd": lambda: optax.sgd(0.7, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(optax.linear_schedule(0.1, 0.0, 3), weight_decay=0.1),
    "by name": lambda: optax.chain(optax.masked(optax.trace(0.9), no_bias), optax.scale(-0.5)),
    "by label": lambda: optax.partition({True: optax.adam(0.1), False: optax.sgd(0.7)}, no_bias),
    "slow momentum": lambda: js.slow_momentum(0.5),
    "outer nesterov": lambda: js.algorithms.outer_nesterov(0.6, 0.8),
}
MIXING = {
    "global norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.7)),
    "lamb": lambda: optax.lamb(0.1),
    "all finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 5),
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
    ("name", "shard_state"),
    [*((name, None) for name in OPTIMIZERS), *((name, True) for name in ELEMENT_WISE)],
)
@pytest.mark.parametrize("parts", [[["bias", "head", "w"]], [["bias", "head"], ["w"]]])
def test_it_is_what_the_optimizer_does_on_the_leaves(name, shard_state, parts):
    fragments = (lambda leaf: int(leaf == "w")) if len(parts) > 1 else 1
    params, state = run(diloco(name, shard_state=shard_state, fragments=fragments))
    assert_close(params, by_hand(OPTIMIZERS[name](), parts), 1e-4)
    shape = (REPLICAS, 2, 3) if shard_state else (REPLICAS, 4, 3)
    assert state.shared["anchor"]["w"].shape == shape
    assert state.shared["anchor"]["bias"].shape == (REPLICAS, 3)  # 2 does not divide it


@pytest.mark.parametrize(
    ("sync", "is_sharded"),
    [
        (js.slowmo("replica", base=BASE, sync_every=4), True),
        (js.slowmo("replica", base=BASE, sync_every=4, shard_state=False), False),
        (js.slowmo("replica", base=BASE, sync_every=4, exact_average=False), False),
        (js.slowmo("replica", base=BASE, sync_every=4, codec=js.codecs.top_k(0.1)), False),
        (js.diloco("replica"), True),
        (js.diloco("replica", shard_state=False), False),
        (diloco("sgd"), None),
        (diloco("sgd", shard_state=True), True),
        (js.local_sgd("replica", sync_every=4, delay=1), False),
        (js.only_finite(js.diloco("replica")), True),
    ],
)
def test_which_state_is_sharded(sync, is_sharded):
    """The arguments alone decide; None: in a step, and in a loop of one's own it is whole."""
    assert sync.algorithm.is_sharded is is_sharded
    assert ("shared state: sharded" in repr(sync)) == bool(is_sharded)


@pytest.mark.parametrize(("size", "is_told"), [(8, True), (64, False)])
def test_leaves_that_stay_whole_are_told_of_above_a_tenth_of_the_bytes(size, is_told):
    """Once; of two leaves one stays whole: 5 elements, beside a block of 8 or of 64."""
    sync = js.diloco("replica", sync_every=EVERY)
    params = {"cut": np.ones((4, 4, size)), "whole": np.ones((4, 5))}
    init = jax.vmap(sync.init, axis_name="replica")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            init(params)
    messages = [str(x.message) for x in caught]
    assert len(messages) == is_told
    assert all(x.startswith("diloco: ") and "38% of the bytes stay whole" in x for x in messages)


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
OF_WHOLE_ARRAYS = {
    "global norm": MIXING["global norm"],
    "lamb": MIXING["lamb"],
    "muon": lambda: optax.contrib.muon(0.1),
    "by name": ELEMENT_WISE["by name"],
}


@pytest.mark.parametrize("name", OF_WHOLE_ARRAYS)
@pytest.mark.parametrize("fragments", [1, 2])
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
        outer = OF_WHOLE_ARRAYS[name]()
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
    assert len(like) > 2 or name == "global norm"
    for x in like:
        named = {n for e in x.sharding.spec for n in ([e] if isinstance(e, str) else e or ())}
        assert named == {"replica", "fsdp"}


@pytest.mark.parametrize(
    ("name", "shard_state"), [("adamw", True), ("adamw", False), ("lamb", None)]
)
def test_on_stages_it_sees_the_leaves_of_the_model(mesh_of, name, shard_state):
    model, params = language_model(2, tied=False)
    mesh = mesh_of({"replica": 2, "stage": 2})
    pipe = js.pipelined(model, params, js.schedules.gpipe(2, 2), mesh=mesh)
    found = []
    for loss_fn, on in ((pipe, mesh), (model, js.virtual_mesh({"replica": 2}))):
        sync = diloco(name, shard_state=shard_state)
        step = js.make_train_step(loss_fn, optax.sgd(0.1), sync=sync, mesh=on)
        state = step.init(params)
        for i in range(4):
            state, _ = step(state, tokens(8, seed=i))
        found.append(step.consensus(state))
    assert_close(*found)


def test_what_mixes_leaves_is_refused_on_stages(mesh_of):
    model, params = language_model(2)
    mesh = mesh_of({"replica": 2, "stage": 2})
    pipe = js.pipelined(model, params, js.schedules.gpipe(2, 2), mesh=mesh)
    step = js.make_train_step(pipe, optax.sgd(0.1), sync=diloco("global norm"), mesh=mesh)
    with pytest.raises(ValueError, match=r"other stages"):
        step.init(params)


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (0.4, 0.5), (1.0, 0.0)])
def test_outer_nesterov_begins_as_an_average_and_becomes_optax_nesterov(rate, momentum):
    """Numbers of the docstring, in float64; from step 27 on those of optax, from an equal trace."""
    ours, rng = js.algorithms.outer_nesterov(rate, momentum), np.random.default_rng(1)
    later = optax.sgd(rate, momentum=momentum, nesterov=True)
    state, then, trace = ours.init(jnp.zeros(3)), None, np.zeros(3)
    for k in range(40):
        away = rng.normal(size=3).astype(np.float32)
        share = min(1.0, k / (0.9 * (k + 3)))
        trace = share * momentum * trace + away
        expected = -(1 + share * (rate - 1)) * (share * momentum * trace + away)
        before = state.trace
        updates, state = ours.update(jnp.asarray(away), state)
        np.testing.assert_allclose(updates, expected, rtol=1e-5, atol=1e-6)
        if k == 0:
            np.testing.assert_array_equal(updates, -away)
        if k == 27:
            (_, *rest) = later.init(jnp.zeros(3))
            then = (optax.TraceState(before), *rest)
        if then is not None:
            expected, then = later.update(jnp.asarray(away), then)
            np.testing.assert_allclose(updates, expected, rtol=1e-6)


def test_the_published_optimizer_is_the_default_and_says_once_for_which_runs_another_is_better(
    caplog,
):
    js.algorithms.published_outer_optimizer.cache_clear()
    default = [js.diloco("replica", sync_every=EVERY) for _ in range(3)]
    diloco("sgd")
    assert [record.name for record in caplog.records] == ["jaxslowmo"]
    assert "js.algorithms.outer_nesterov()" in caplog.text
    assert_close(run(default[0])[0], run(diloco("sgd", shard_state=True))[0], 0)


@pytest.mark.parametrize(
    "wrong", [{"learning_rate": -1.0}, {"momentum": 1.0}, {"momentum": "0.9"}], ids=str
)
def test_outer_nesterov_names_an_argument_that_breaks_its_rule(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"`{name}` must be a"):
        js.algorithms.outer_nesterov(**wrong)
