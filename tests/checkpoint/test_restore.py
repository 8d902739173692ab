"""Tests that resumed runs equal undisturbed runs, bit by bit, from any step of a period."""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from checkpoint.runs import MODEL_STATE, PARAMS, PERIOD, SYNCS, batch, leaf_bytes, make_step
from jaxslowmo.checkpoint import CheckpointError, Checkpoints, _record
from jaxslowmo.tree import leaf_names
from support.exhaustive import sweep

LAST = PERIOD + 1
# Together they hold all kinds of state, in host mode and in traced mode.
USUAL = ("all_reduce", "sgp late", "slowmo over sgp", "own anchors", "diloco", "two levels")


@pytest.mark.parametrize("name", sweep(SYNCS, lambda name: name in USUAL))
def test_every_step_of_a_period_can_be_resumed(name, mesh_of, tmp_path):
    axes = {"node": 2, "device": 2} if name == "two levels" else {"replica": 4}
    mode = "traced" if name in ("all_reduce", "sgp", "own anchors", "diloco") else "host"
    step = make_step(name, mesh_of(axes), mode=mode)
    state = step.init(PARAMS, model_state=MODEL_STATE, seed=3)
    with Checkpoints(tmp_path, keep=LAST) as checkpoints:
        for t in range(1, LAST + 1):
            state, _ = step(state, batch(t, 4))
            checkpoints.save(t, state, extra={"position": [t, {"a": None}]})
        undisturbed = leaf_bytes(state)
        for t in range(1, LAST):
            restored = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE, step=t)
            assert (restored.step, restored.is_exact, restored.notes) == (t, True, ())
            assert restored.extra == {"position": [t, {"a": None}]}
            state = restored.state
            for later in range(t + 1, LAST + 1):
                state, _ = step(state, batch(later, 4))
            assert leaf_bytes(state) == undisturbed, t


def test_the_same_replicas_elsewhere_hold_the_same_bits(mesh_of, tmp_path):
    name = "slowmo over local_sgd"
    sync = js.slowmo("replica", base=js.sgp("replica"), sync_every=2, local_axis_name="device")
    places = [
        mesh_of({"replica": 2, "device": 2}),
        js.virtual_mesh({"replica": 2, "device": 2}),
        mesh_of({"replica": 2, "device": 4}),
    ]
    steps = [make_step(name, mesh, sync=sync) for mesh in places]
    state = steps[0].init(PARAMS, model_state=MODEL_STATE)
    for t in (1, 2, 3):
        state, _ = steps[0](state, batch(t, 4))
    anchors = []
    for i, step in enumerate(steps):
        with Checkpoints(tmp_path / str(i)) as checkpoints:
            checkpoints.save(3, state, wait=True)
            restored = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE)
        assert restored.is_exact
        assert restored.notes == ()
        # Shards of anchor and momentum are laid out for the devices of a replica.
        rest = lambda s: leaf_bytes((s.params, s.opt_state[:-1], s.opt_state[-1].base, s.rng))  # noqa: E731
        assert rest(restored.state) == rest(state)
        state = restored.state
        anchor = js.read_anchor(
            step.sync, state.opt_state[-1], state.params, mesh=places[i], axis_name="replica"
        )
        anchors.append([np.asarray(x) for x in anchor.values()])
        for a, b in zip(anchors[0], anchors[-1], strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_saved_state_may_be_donated_at_once(mesh_of, tmp_path):
    step = make_step("local_sgd", mesh_of({"replica": 2}))
    state = step.init(PARAMS, model_state=MODEL_STATE)
    before = leaf_bytes(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        for t in range(3):
            state, _ = step(state, batch(t, 2))
        restored = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE)
    assert leaf_bytes(restored.state) == before


@pytest.mark.parametrize("replicas", [2, 3])
def test_leaves_without_elements_are_made_anew(replicas, mesh_of, tmp_path):
    """Orbax does not store such leaves, so restoring creates them, for any number of replicas."""
    params = {**PARAMS, "none": np.zeros((0, 3), np.float32)}
    few, other = (make_step("local_sgd", mesh_of({"replica": n})) for n in (2, replicas))
    state = few.init(params, model_state=MODEL_STATE)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, wait=True)
        restored = checkpoints.restore(other, params, model_state=MODEL_STATE).state
    assert restored.params["none"].shape == (replicas, 0, 3)
    if replicas == 2:
        assert leaf_bytes(restored) == leaf_bytes(state)
    other(restored, batch(1, replicas))


@pytest.mark.parametrize("replicas", [4, 2])
def test_moments_that_the_first_update_widens_are_restored_wide(replicas, tmp_path):
    """The optimizer multiplies moments in half precision by hyperparameters in float32."""
    injected = optax.inject_hyperparams(optax.adam, hyperparam_dtype=np.float32)(0.1)
    steps = [
        make_step("local_sgd", js.virtual_mesh({"replica": n}), optimizer=injected)
        for n in (4, replicas)
    ]
    fresh = state = steps[0].init(PARAMS, model_state=MODEL_STATE)
    widths = [fresh.opt_state[1].inner_state[0].mu["b"].dtype.itemsize]
    with Checkpoints(tmp_path) as checkpoints:
        for t in (1, 2):
            state, _ = steps[0](state, batch(t, 4))
            checkpoints.save(t, state)
        restored = checkpoints.restore(steps[1], PARAMS, model_state=MODEL_STATE)
    moment = restored.state.opt_state[1].inner_state[0].mu["b"]
    assert [*widths, moment.dtype.itemsize] == [2, 4]
    if replicas == 4:
        assert leaf_bytes(restored.state) == leaf_bytes(state)
    resumed, _ = steps[1](restored.state, batch(3, replicas))
    assert resumed.opt_state[1].inner_state[0].mu["b"].dtype == moment.dtype


def test_parameters_of_another_width_are_refused(tmp_path):
    mesh = js.virtual_mesh({"replica": 2})
    step = make_step("local_sgd", mesh)
    wide = {**PARAMS, "b": PARAMS["b"].astype(np.float32)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, step.init(wide, model_state=MODEL_STATE))
        with pytest.raises(CheckpointError, match=r"params/b is float32\[40\] in the checkpoint"):
            checkpoints.restore(step, PARAMS, model_state=MODEL_STATE)


# Names of fields in 0.1.0, under which their leaves are stored in checkpoints of that version.
NAMES_OF_0_1_0 = {"last_rate": "learning_rate", "loss_scale": "scale", "clip_factor": "scale"}


def test_states_are_restored_whose_fields_had_other_names(monkeypatch, tmp_path):
    optimizer = optax.chain(js.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adam)(1e-2))
    step = make_step(
        "slowmo over local_sgd",
        js.virtual_mesh({"replica": 2}),
        optimizer=js.dynamic_loss_scale(optimizer, initial=4.0),
    )
    state, _ = step(step.init(PARAMS, model_state=MODEL_STATE), batch(0, 2))

    def names_of_0_1_0(tree):
        parts = [name.rpartition("/") for name in leaf_names(tree)]
        return [f"{path}{slash}{NAMES_OF_0_1_0.get(field, field)}" for path, slash, field in parts]

    with Checkpoints(tmp_path) as checkpoints:
        with monkeypatch.context() as then:
            then.setattr(_record, "leaf_names", names_of_0_1_0)
            checkpoints.save(1, state, wait=True)
        saved = [
            leaf[1]
            for leaf in json.loads((tmp_path / "1" / "record" / "metadata").read_text())["leaves"]
        ]
        assert sum(x.endswith(("/learning_rate", "/scale")) for x in saved) == 4
        restored = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE)
    assert restored.is_exact
    assert leaf_bytes(restored.state) == leaf_bytes(state)


class NormAndScale(NamedTuple):
    """A state whose fields have the names that `js.clip_by_global_norm` used in 0.1.0."""

    norm: np.ndarray
    scale: np.ndarray


def transform_with_names_of_0_1_0():
    """Return a transform whose state has the names of fields of 0.1.0."""
    state = {
        "clip": NormAndScale(np.float32(2), np.float32(3)),
        "slow": {"made_at": np.float32(4), "learning_rate": np.float32(5)},
        "precision": {"hysteresis_left": np.float32(6), "scale": np.float32(7)},
    }
    return optax.GradientTransformation(lambda _: state, lambda updates, old, _: (updates, old))


@pytest.mark.parametrize("replicas", [2, 4])
def test_old_names_in_the_state_of_another_transform_stay(replicas, tmp_path):
    optimizer = optax.chain(optax.adam(1e-2), transform_with_names_of_0_1_0())
    names = ("norm", "scale", "made_at", "learning_rate", "hysteresis_left")
    params = {"ln": {name: np.full(2, i, np.float32) for i, name in enumerate(names)}}
    steps = [
        js.make_train_step(
            lambda params, batch: sum(map(jnp.sum, params["ln"].values())) * batch.mean(),
            optimizer,
            sync=js.slowmo("replica", base=js.local_sgd("replica", sync_every=1), sync_every=2),
            mesh=js.virtual_mesh({"replica": number}),
        )
        for number in (2, replicas)
    ]
    state, _ = steps[0](steps[0].init(params), np.ones(4, np.float32))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(steps[1], params)
    assert leaf_names(restored.state) == leaf_names(state)
    if replicas == 2:
        assert leaf_bytes(restored.state) == leaf_bytes(state)
    first = [jax.tree.map(lambda x: x[0], s.opt_state[1]) for s in (restored.state, state)]
    assert leaf_bytes(first[0]) == leaf_bytes(first[1])
