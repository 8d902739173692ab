"""Outer state is sharded where the outer optimizer is element-wise on the model's tree, else whole.

In every form it does what it does on the model's own leaves. By hand it runs in plain optax.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.layered import assert_close, language_model, tokens
from support.promotion import promoting

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


def by_name():
    return optax.chain(optax.masked(optax.trace(0.9), no_bias), optax.scale(-0.5))


def by_label():
    return optax.partition({True: optax.adam(0.1), False: optax.sgd(0.7)}, no_bias)


def by_size():
    """What says the same of all leaves, and another thing of all of them together."""
    small = lambda tree: jax.tree.map(lambda x: x.size < 20, tree)  # noqa: E731
    return optax.chain(optax.masked(optax.scale(3.0), small), optax.sgd(0.3))


ELEMENT_WISE = {
    "default": lambda: None,
    "adamw": lambda: optax.adamw(optax.linear_schedule(0.1, 0.0, 3), weight_decay=0.1),
    "lion": lambda: optax.lion(0.1),
    "clip": lambda: optax.chain(optax.clip(0.5), optax.sgd(0.1)),
    "every second": lambda: promoting(
        optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    ),
    "slow momentum": lambda: js.slow_momentum(0.5),
}
WHOLE = {
    "by name": (by_name, "'bias' and 'head' differently"),
    "by label": (by_label, "'bias' and 'head' differently"),
    "by size": (by_size, "buffers"),
    "far global norm": (
        lambda: optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(0.7)), "is computed from"
    ),
    "lamb": (lambda: optax.lamb(0.1), "combines elements of 'bias'"),
    "all finite": (lambda: optax.apply_if_finite(optax.sgd(0.1), 5), "is computed from"),
    "noise": (
        lambda: optax.chain(promoting(optax.add_noise(0.1, 0.5, 0)), optax.sgd(0.1)), "random_bits"
    ),
}  # fmt: skip
OPTIMIZERS = {**ELEMENT_WISE, **{name: make for name, (make, _) in WHOLE.items()}}


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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_what_the_optimizer_does_on_the_leaves(name):
    optimizer = OPTIMIZERS[name]() or optax.sgd(0.7, momentum=0.9, nesterov=True)
    sync = diloco(name)
    params, state = run(sync)
    assert_close(params, by_hand(optimizer, [[*SHAPES]]), 1e-4)
    assert isinstance(state.anchor, tuple) == (name in ELEMENT_WISE)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shard_state", [None, True, False])
def test_what_is_asked_for_is_done_or_refused(name, shard_state):
    sync = diloco(name, shard_state=shard_state)
    if shard_state and name in WHOLE:
        with pytest.raises(ValueError, match=r"`outer_optimizer`") as refused:
            jax.vmap(sync.init, axis_name="replica")(STACKED)
        assert "shard_state=True" in str(refused.value)
        assert WHOLE[name][1] in str(refused.value)
        return
    _, state = run(sync)
    is_sharded = shard_state is not False and name in ELEMENT_WISE
    assert isinstance(state.anchor, tuple) == is_sharded


def test_an_optimizer_that_tells_shards_from_leaves_is_refused():
    """The shard of a replica is smaller than every leaf, and all leaves together are larger."""

    def large(tree):
        return jax.tree.map(lambda x: x.size > 2, tree)

    tx = optax.chain(optax.masked(optax.scale(3.0), large), optax.sgd(0.3))
    sync = js.diloco("replica", sync_every=EVERY, outer_optimizer=tx)
    params = {name: np.ones((16, 3), np.float32) for name in "ab"}
    with pytest.raises(ValueError, match="`outer_optimizer`"):
        jax.vmap(sync.init, axis_name="replica")(params)


@pytest.mark.parametrize("name", ["by name", "by label", "adamw"])
@pytest.mark.parametrize("shard_state", [None, False])
def test_a_fragment_has_the_names_of_the_model(name, shard_state):
    def part(leaf):
        return int(leaf == "w")

    params, _ = run(diloco(name, shard_state=shard_state, fragments=part))
    assert_close(params, by_hand(OPTIMIZERS[name](), [["bias", "head"], ["w"]]), 1e-4)


def test_repr_and_report_say_where_the_state_is_and_why():
    mesh = js.make_mesh({"replica": REPLICAS})
    for name, words in {"adamw": "sharded", "by name": "whole"}.items():
        sync = diloco(name)
        step = js.make_train_step(
            lambda p, b: jnp.sum(p["w"][None] * b), optax.sgd(0.1), sync=sync, mesh=mesh
        )
        assert "where `outer_optimizer` is element-wise" in repr(sync)
        state = jax.eval_shape(step.init, PARAMS)
        report = js.comm_report(step, state, np.ones((4, 4, 3), np.float32))
        why = "is element-wise" if words == "sharded" else "treats 'bias' and 'head' differently"
        for text in (repr(step.sync), str(report)):
            assert f"{words} " in text
            assert why in text
        assert js.comm_report(lambda x: x, 1.0).state == ""
    for shard_state, words in ((True, "sharded over"), (False, "whole on each")):
        base = js.local_sgd("replica", sync_every=2)
        assert words in repr(js.slowmo("replica", base=base, shard_state=shard_state, sync_every=4))
    assert repr(base).startswith("<js.local_sgd(axis_name='replica', sync_every=2")


def ups(tree):
    named = jax.tree_util.tree_map_with_path
    return named(lambda path, _: "up" if "up" in jax.tree_util.keystr(path) else "rest", tree)


STAGED = {
    "element-wise": lambda: optax.adam(0.05),
    "by label": lambda: optax.partition({"up": optax.sgd(0.1), "rest": optax.adam(0.05)}, ups),
    "lamb": lambda: optax.lamb(0.02),
}


@pytest.mark.parametrize("name", STAGED)
def test_on_stages_it_sees_the_leaves_of_the_model(mesh_of, name):
    model, params = language_model(2, tied=False)
    mesh = mesh_of({"replica": 2, "stage": 2})
    pipe = js.pipelined(model, params, js.schedules.gpipe(2, 2), mesh=mesh)
    found = []
    for loss_fn, on in ((pipe, mesh), (model, js.virtual_mesh({"replica": 2}))):
        sync = js.diloco("replica", sync_every=2, outer_optimizer=STAGED[name]())
        step = js.make_train_step(loss_fn, optax.sgd(0.1), sync=sync, mesh=on)
        state = step.init(params)
        for i in range(4):
            state, _ = step(state, tokens(8, seed=i))
        found.append(step.consensus(state))
        assert isinstance(state.opt_state[-1].anchor, tuple) == (name == "element-wise")
    assert_close(*found)


def test_what_mixes_leaves_is_refused_on_stages(mesh_of):
    model, params = language_model(2)
    mesh = mesh_of({"replica": 2, "stage": 2})
    pipe = js.pipelined(model, params, js.schedules.gpipe(2, 2), mesh=mesh)
    mixing = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.7))
    sync = js.diloco("replica", sync_every=2, outer_optimizer=mixing)
    step = js.make_train_step(pipe, optax.sgd(0.1), sync=sync, mesh=mesh)
    with pytest.raises(ValueError, match=r"other stages"):
        step.init(params)
