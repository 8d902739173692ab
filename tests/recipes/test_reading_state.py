"""What the page on reading state reads is what it says."""

import jax
import numpy as np
import optax

import jaxslowmo as js
from recipes.doc_blocks import run, sections


def test_values_read_from_the_state():
    found = run("reading-state", *sections("reading-state"))
    assert found["updates"] == found["updates_of_base"] == 24
    assert found["next_phase"] == ()
    assert np.float32(found["gamma"]) == np.float32(0.1)
    # Update 24 was a slow step: parameters are the anchor, on every replica.
    for name, anchor in found["anchor"].items():
        np.testing.assert_allclose(found["first_replica"][name], anchor[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(found["averaged"][name].shape, anchor.shape[1:])
    assert found["loss"] < 0.5 * np.var(found["y"][24])


def test_velocity_is_the_displacement_with_momentum():
    found = run("reading-state", "")
    sync = found["sync"]
    step, mesh, x, y = found["step"], found["mesh"], found["x"], found["y"]
    state, anchors, velocities = step.init(found["params"]), [], []
    for t, batch in enumerate(zip(x[:12], y[:12], strict=True), start=1):
        state, _ = step(state, batch)
        if t % 6 == 0:
            slow = state.opt_state[-1]
            anchors.append(js.read_anchor(sync, slow, state.params, mesh=mesh))
            velocity = slow._replace(anchor=slow.outer.velocity)
            velocities.append(js.read_anchor(sync, velocity, state.params, mesh=mesh))
    # anchor <- anchor - velocity with slow_learning_rate = 1
    moved = jax.tree.map(np.subtract, anchors[0], anchors[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), moved, velocities[1])
    assert mesh.shape["replica"] == 4


def test_unsharded_anchors_have_the_replica_axis():
    found = run("reading-state", "")
    sync = js.slowmo("replica", base=js.local_sgd("replica"), sync_every=6, shard_state=False)
    step = js.make_train_step(found["loss_fn"], optax.sgd(0.1), sync=sync, mesh=found["mesh"])
    state = step.init(found["params"])
    anchor = js.read_anchor(sync, state.opt_state[-1], state.params, mesh=found["mesh"])
    assert {name: leaf.shape for name, leaf in anchor.items()} == {"w": (4, 3), "b": (4,)}
