"""States of `js.with_exchange`: the same bits on the same replicas, the consensus on others."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from checkpoint.runs import leaf_bytes, on_host
from jaxslowmo.checkpoint import CheckpointError, Checkpoints
from train.libraries import FORMS, PARAMS, PARTS, WIDTH, loss_fn, placed, start, stepped

SYNCS = {
    "slowmo of sgp": lambda: js.slowmo("replica", base=js.sgp("replica", overlap=2), sync_every=4),
    "diloco": lambda: js.diloco("replica", sync_every=4, delay=1, fragments=2),
}


def batch(t, replicas):
    return np.random.default_rng(t).normal(size=(2 * replicas, WIDTH)).astype(np.float32)


def mesh_of(where):
    if isinstance(where, int):
        return js.virtual_mesh({"replica": where})
    return js.make_mesh(where)


def made(form, sync, where):
    """Return a step of a library on a mesh or on virtual replicas, and its state of one replica."""
    mesh = mesh_of(where)
    train_step, one, parts, _ = FORMS[form](placed(mesh))
    step = js.with_exchange(train_step, SYNCS[sync](), mesh=mesh, mode="host", **parts)
    return step, one


def trained(step, state, first, last, replicas):
    for t in range(first, last):
        state, _ = step(state, batch(t, replicas))
    return state


@pytest.mark.parametrize(("form", "sync"), [("plain", "slowmo of sgp"), ("nnx", "diloco")])
def test_the_same_replicas_go_on_with_the_same_bits(form, sync, tmp_path):
    """So they do on other devices, where parameters are sharded inside a replica."""
    step, one = made(form, sync, {"replica": 4})
    state = trained(step, step.init(one), 0, 5, 4)  # at 5 something is in flight
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, extra={"position": 5}, wait=True)
        other, again = made(form, sync, {"replica": 4, "fsdp": 2})
        found = checkpoints.restore(other, again)
        assert (found.step, found.is_exact, found.notes) == (5, True, ())
        assert found.extra == {"position": 5}
        assert leaf_bytes(found.state) == leaf_bytes(state)
        assert other.next_phase(found.state) == step.next_phase(state)
        same = checkpoints.restore(step, one).state
    end = trained(step, state, 5, 7, 4)
    assert leaf_bytes(trained(step, same, 5, 7, 4)) == leaf_bytes(end)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6),
        *jax.device_get((trained(other, found.state, 5, 7, 4), end)),
    )


def test_other_replicas_begin_at_the_consensus(tmp_path):
    form, sync = "nnx", "slowmo of sgp"
    step, one = made(form, sync, 8)
    state = trained(step, step.init(one), 0, 5, 8)
    mean = on_host(step.consensus(state))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, wait=True)
        other, again = made(form, sync, {"replica": 2, "fsdp": 2})
        found = checkpoints.restore(other, again)
    old, new = on_host(state), on_host(found.state)
    assert not found.is_exact
    assert "2 replicas start from the consensus of 8" in found.notes[0]
    means = jax.tree.leaves(mean)
    params = jax.tree.leaves(other.as_train_state(new).params)
    for x, y in zip(params, means, strict=True):
        np.testing.assert_allclose(x, [y] * 2, rtol=1e-6, atol=1e-6)
    for x, y in zip(jax.tree.leaves(old.state), jax.tree.leaves(new.state), strict=True):
        assert (y == y[:1]).all()
        if not any(y is z for z in params):
            np.testing.assert_allclose(y[0], x.mean(0), rtol=1e-5, atol=1e-6)
    assert leaf_bytes(new.exchange.shared) == leaf_bytes(old.exchange.shared)
    assert new.step.tolist() == [5] * 2
    assert other.next_phase(found.state) == other.phase(6)
    fresh = other.init(again)
    for x, y in zip(jax.tree.leaves(found.state), jax.tree.leaves(fresh), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    trained(other, found.state, 5, 6, 2)


def test_states_of_other_doors_are_refused_by_name(tmp_path):
    step = js.with_exchange(stepped, SYNCS["diloco"](), mesh=mesh_of(2), **PARTS)
    plain = js.make_train_step(loss_fn, optax.sgd(0.1), sync=SYNCS["diloco"](), mesh=mesh_of(2))
    one = start(PARAMS)
    for name, state, other, template, message in (
        ("with", step.init(one), plain, PARAMS, "of js.with_exchange, and .* js.make_train"),
        ("plain", plain.init(PARAMS), step, one, "of js.make_train_step, and .* js.with_ex"),
        ("other", step.init(one), step, start(PARAMS, optax.sgd(0.1)), "another model, optimizer"),
    ):
        with Checkpoints(tmp_path / name) as checkpoints:
            checkpoints.save(0, state, wait=True)
            with pytest.raises(CheckpointError, match=message):
                checkpoints.restore(other, template)
