"""PRNG keys in model state, as of nnx.Dropout: no two devices drop the same units."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxslowmo as js
from support.exhaustive import sweep
from support.meshes import MESHES
from support.pairs import two_processes

PARAMS = {"w": np.ones(64, np.float32)}
BATCH = np.ones((8, 1), np.float32)


def loss(params, batch, *, model_state):
    """Draws as nnx does: from a key and how often it was used."""
    key = jax.random.fold_in(model_state["key"], model_state["count"])
    mask = jax.random.bernoulli(key, 0.5, params["w"].shape)
    after = {**model_state, "count": model_state["count"] + 1}
    # Which units this device has kept, as one number of 24 bits.
    kept = jnp.sum(jnp.where(mask[:24], 2.0 ** jnp.arange(24), 0.0))
    return jnp.mean(mask * params["w"]) * batch.mean(), ({"kept": kept}, after)


def start(seed=5):
    return {"key": jax.random.key(seed), "count": jnp.uint32(0)}


AVERAGE = js.local_sgd("replica")


def trained(mesh, mode="local", sync=AVERAGE, steps=3):
    step = js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=mesh, model_state=mode)
    state = step.init(PARAMS, model_state=start())
    kept = []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        kept.append(np.asarray(metrics["kept"]))
    return state, np.array(kept)


@functools.cache
def trained_alone():
    return trained(js.virtual_mesh({"replica": 1}), sync="none")[1]


@pytest.mark.parametrize(
    ("kind", "mode"),
    sweep(
        itertools.product(MESHES, ["sync_mean", "broadcast", "local"]),
        lambda kind, mode: kind == "virtual" or mode == "sync_mean",
    ),
)
def test_masks_differ_between_replicas_and_steps(kind, mode):
    state, kept = trained(MESHES[kind]({"replica": 4}), mode)
    assert len(np.unique(kept)) == kept.size
    assert np.array_equal(state.model_state["count"], [3] * 4)
    # Replica 0 draws what one replica would.
    alone = trained_alone()
    assert np.array_equal(kept[:, 0], alone[:, 0])


@pytest.mark.parametrize("kind", MESHES)
def test_masks_differ_inside_a_replica(kind):
    """A metric is the mean over a replica's devices: of equal masks it would be one of them."""
    mesh = MESHES[kind]({"replica": 2, "device": 2})
    state, kept = trained(mesh, "sync_mean")
    alone = trained_alone()
    assert not np.isin(kept, alone).any()
    keys = np.asarray(jax.random.key_data(state.model_state["key"]))
    # They are what they were, however often they were used.
    assert np.array_equal(keys[0], jax.random.key_data(jax.random.key(5)))
    assert not np.array_equal(keys[0], keys[1])


def test_dropout_of_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones(64))
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self):
            return self.dropout(self.scale.get_value())

    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, batch, *, model_state):
        model = nnx.merge(graph, params, model_state, copy=True)
        out = model()
        _, _, after = nnx.split(model, nnx.Param, ...)
        return out.mean() * batch.mean(), ({"out": out}, after)

    mesh = js.virtual_mesh({"replica": 4})
    step = js.make_train_step(loss, optax.sgd(0.0), sync=js.local_sgd("replica"), mesh=mesh)
    state = step.init(params, model_state=rest)
    seen = []
    for _ in range(2):
        state, metrics = step(state, BATCH)
        seen += [tuple(row) for row in np.asarray(metrics["out"])]
    assert len(set(seen)) == 8


def test_keys_without_a_type_are_told():
    """All replicas would draw alike."""
    model_state = {"key": jax.random.PRNGKey(5), "count": jnp.uint32(0), "ids": jnp.arange(3)}
    for mesh in (js.virtual_mesh({"replica": 2}), js.make_mesh({"replica": 2})):
        step = js.make_train_step(loss, optax.sgd(0.1), sync=AVERAGE, mesh=mesh)
        with pytest.warns(
            UserWarning, match=r"^`model_state`: key looks like .*raw_keys=True.*wrap_key_data"
        ):
            step.init(PARAMS, model_state=model_state)
        typed = jax.random.wrap_key_data(model_state["key"])
        step.init(PARAMS, model_state={**model_state, "key": typed})  # warnings are errors
    alone = js.virtual_mesh({"replica": 1})
    js.make_train_step(loss, optax.sgd(0.1), sync="none", mesh=alone).init(
        PARAMS, model_state=model_state
    )


def raw_loss(params, batch, *, model_state):
    """Draws as Keras does: from a seed and a counter in one leaf of two uint32."""
    key = model_state["key"]
    assert (key.dtype, key.shape) == (jnp.uint32, (2,))
    value, (metrics, after) = loss(params, batch, model_state=model_state)
    return value, (metrics, {**after, "key": key + jnp.array([0, 1], jnp.uint32)})


@pytest.mark.parametrize(
    ("kind", "options"),
    sweep(
        itertools.product(
            MESHES, [{}, {"model_state": "broadcast", "accumulate": 2}, {"accumulate": 2}]
        ),
        lambda kind, options: len(options) == (2 if kind == "virtual" else 0),
    ),
)
def test_raw_keys_become_the_replicas_own(kind, options):
    devices = {"replica": 2, "device": 2}
    step = js.make_train_step(
        raw_loss,
        optax.sgd(0.1),
        sync=AVERAGE,
        mesh=MESHES[kind](devices),
        raw_keys=True,
        policy=js.Policy("bfloat16"),
        **options,
    )
    raw = {"key": np.array([7, 0], np.uint32), "count": jnp.uint32(0), "ids": jnp.arange(2)}
    state = step.init(PARAMS, model_state=raw)
    before = np.asarray(jax.random.key_data(state.model_state["key"]))
    assert np.array_equal(before[0], raw["key"])  # replica 0 draws what one replica would
    assert not np.array_equal(before[0], before[1])
    kept = []
    for _ in range(3):
        state, metrics = step(state, BATCH)
        kept.append(np.asarray(metrics["kept"]))
    assert len(np.unique(kept)) == np.size(kept)
    draws = 3 * options.get("accumulate", 1)
    after = np.asarray(jax.random.key_data(state.model_state["key"]))
    assert np.array_equal(after - before, np.broadcast_to(np.uint32([0, draws]), (2, 2)))
    assert np.array_equal(state.model_state["ids"], [[0, 1]] * 2)


def test_raw_keys_is_true_or_false():
    with pytest.raises(ValueError, match=r"`raw_keys` must be True or False, got 'keras'\."):
        js.make_train_step(
            raw_loss,
            optax.sgd(0.1),
            sync=AVERAGE,
            mesh=js.virtual_mesh({"replica": 2}),
            raw_keys="keras",
        )


PROGRAM = """
import jax.numpy as jnp
import numpy as np
import optax
import jaxslowmo as js

def loss(params, batch, *, model_state):
    drawn = jax.random.uniform(model_state["key"])
    return jnp.sum(params["w"]) * batch.mean(), ({"drawn": drawn}, model_state)

mesh = js.make_mesh({"replica": 2})
step = js.make_train_step(loss, optax.sgd(0.1), sync=js.local_sgd("replica"), mesh=mesh)
state = step.init({"w": np.ones(2)}, model_state={"key": jax.random.key(5)})
state, metrics = step(state, np.ones(1) + rank)
print(js.host_mean(metrics)["drawn"])
"""


def test_keys_over_processes(tmp_path):
    """jax puts bits on devices of other processes, and no keys."""
    first, second = two_processes(PROGRAM, tmp_path)
    assert float(first) == float(jax.random.uniform(jax.random.key(5)))
    assert float(first) != float(second)


@pytest.mark.parametrize("kind", MESHES)
def test_states_whose_keys_are_still_raw_are_refused(kind):
    """All replicas would draw alike."""
    mesh = MESHES[kind]({"replica": 2})
    options = {"optimizer": optax.sgd(0.1), "sync": AVERAGE, "mesh": mesh}
    step = js.make_train_step(raw_loss, **options, raw_keys=True)
    model_state = {"key": jax.random.PRNGKey(5), "count": jnp.uint32(0), "ids": jnp.arange(2)}
    refusal = r"^`state`: .*`model_state` .* key is uint32\[2\].*step\.init"
    with pytest.warns(UserWarning, match="looks like"):
        raw = js.make_train_step(raw_loss, **options).init(PARAMS, model_state=model_state)
    with pytest.raises(ValueError, match=refusal):
        step(raw, BATCH)
    state, _ = step(step.init(PARAMS, model_state=model_state), BATCH)
    with pytest.raises(ValueError, match=refusal):  # also once there is a program
        step(raw, BATCH)
    step(state, BATCH)


@pytest.mark.parametrize("key", [np.zeros(3, np.uint32), np.zeros(2, np.int32), np.float32(0)])
def test_a_loss_function_that_returns_no_key_is_refused(key):
    def loss(params, batch, *, model_state):
        value, (metrics, after) = raw_loss(params, batch, model_state=model_state)
        return value, (metrics, {**after, "key": jnp.asarray(key)})

    mesh = js.virtual_mesh({"replica": 2})
    step = js.make_train_step(loss, optax.sgd(0.1), sync=AVERAGE, mesh=mesh, raw_keys=True)
    raw = {"key": np.array([7, 0], np.uint32), "count": jnp.uint32(0)}
    shape = ",".join(map(str, key.shape))
    with pytest.raises(
        ValueError, match=rf"^`loss_fn` .* key .* uint32\[2\].* got {key.dtype}\[{shape}\]"
    ):
        step(step.init(PARAMS, model_state=raw), BATCH)
