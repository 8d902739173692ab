"""Other numbers of replicas: what is averaged, what is kept, and that it is said; and the same."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from checkpoint.runs import (
    MODEL_STATE,
    PARAMS,
    PERIOD,
    batch,
    leaf_bytes,
    make_step,
    on_host,
    trained,
)
from jaxslowmo.checkpoint import Checkpoints
from support.promotion import promoting


def consensus(state: js.TrainState) -> dict[str, np.ndarray]:
    """Return the sum of all mass over the sum of all weights, in float64."""
    terms = [(np.ones(len(state.step)), state.params)]
    if isinstance(state.exchange.local, dict) and "base" in state.exchange.local:
        gossip = state.exchange.local["base"]
        terms = [(gossip.weight, state.params), *((a.weight, a.mean) for a in gossip.in_flight)]
    total = sum(np.sum(w, dtype=np.float64) for w, _ in terms)
    return {
        name: sum(np.tensordot(np.float64(w), np.float64(x[name]), 1) for w, x in terms) / total
        for name in state.params
    }


def anchor(step, state):
    read = js.read_anchor(step.sync, state.exchange, state.params, mesh=step.mesh)
    return on_host(read)


NOTES = {
    "slowmo over sgp": ("push-sum", "in flight", "kept exactly", "averaged", "PRNG"),
    "noloco": ("slow momentum of its own", "averaged"),
    "all_reduce": ("error feedback", "Counters go on"),
}


@pytest.mark.parametrize("name", NOTES)
def test_4_to_3_to_8(name, tmp_path):
    old_step = make_step(name, 4, mode="traced")
    state = trained(old_step, old_step.init(PARAMS, model_state=MODEL_STATE), 0, 6)
    for replicas in (3, 8):
        step = make_step(name, replicas, mode="traced")
        with Checkpoints(tmp_path / str(replicas)) as checkpoints:
            checkpoints.save(6, state, wait=True)
            found = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE, seed=replicas)
        assert not found.is_exact
        old, new = on_host(state), on_host(found.state)
        for leaf, mean in consensus(old).items():
            assert (new.params[leaf] == new.params[leaf][0]).all()
            rounding = 2e-2 if leaf == "b" else 1e-6  # bfloat16, float32
            got = new.params[leaf][0].astype(np.float64)
            np.testing.assert_allclose(got, mean, rtol=rounding, atol=1e-6)
        parts = ((s.opt_state, s.exchange.gradients, s.model_state) for s in (old, new))
        for a, b in zip(*map(jax.tree.leaves, parts), strict=True):
            assert len(b) == replicas
            mean, rounding = a.astype(np.float64).mean(0), 1e-2 if a.itemsize == 2 else 1e-6
            np.testing.assert_allclose(b[-1].astype(np.float64), mean, rtol=rounding, atol=1e-7)
        assert new.step.tolist() == [6] * replicas
        assert len({key.tobytes() for key in new.rng}) == replicas
        text = " ".join(found.notes)
        for words in (f"{replicas} replicas", f"consensus of {len(old.step)}", *NOTES[name]):
            assert words in text
        if name == "slowmo over sgp":
            outer = new.exchange
            assert outer.local["base"].weight.tolist() == [1] * replicas
            assert not any(np.any(x) for x in jax.tree.leaves(outer.local["base"].in_flight))
            assert (outer.local["base"].exchanges == old.exchange.local["base"].exchanges[0]).all()
            anchors = anchor(old_step, state), anchor(step, found.state)
            for leaf, a in anchors[0].items():
                np.testing.assert_array_equal(a[0], anchors[1][leaf][-1])
            velocities = (x.exchange.shared["outer"].velocity for x in (old, new))
            for velocity, moved in zip(*map(jax.tree.leaves, velocities), strict=True):
                assert np.any(velocity)
                np.testing.assert_array_equal(velocity, moved)
        state, old_step = found.state, step


def test_the_least_loss_scale_goes_on_with_its_counters(tmp_path):
    """A mean would be no power of two; of equal scales it is that which grows last."""
    tx = js.dynamic_loss_scale(optax.adam(0.1), growth_interval=5, initial=16.0)

    def step_on(replicas):
        return js.make_train_step(
            lambda params, x: (params["w"] * x).mean(),
            tx,
            sync=js.local_sgd("replica", sync_every=2),
            mesh=js.virtual_mesh({"replica": replicas}),
        )

    params = {"w": np.ones(3, np.float32)}
    state = step_on(4).init(params)
    values = {
        "loss_scale": np.float32([16, 1, 16, 1]),
        "growth_count": np.int32([4, 3, 2, 1]),
        "skipped": np.int32([0, 4, 0, 5]),
    }
    scales = state.opt_state._replace(**values)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state._replace(opt_state=scales), wait=True)
        for replicas in (4, 6):
            found = checkpoints.restore(step_on(replicas), params)
            for name, x in values.items():
                wanted = x.tolist() if replicas == 4 else [x[-1]] * replicas
                assert getattr(found.state.opt_state, name).tolist() == wanted, (replicas, name)
            assert ("loss scale" in " ".join(found.notes)) == (replicas != 4)


def test_new_keys_depend_on_the_seed_and_those_of_the_model_differ_as_in_a_new_run(tmp_path):
    """Copies of replica 0's would make all replicas drop the same units."""
    model_state = {**MODEL_STATE, "dropout": jax.random.key(3)}
    few, more = (make_step("local_sgd", n) for n in (2, 4))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, few.init(PARAMS, model_state=model_state))
        found = [
            on_host(checkpoints.restore(more, PARAMS, model_state=model_state, seed=s).state)
            for s in (0, 0, 1)
        ]
    np.testing.assert_array_equal(found[0].rng, found[1].rng)
    assert not np.any(np.all(found[0].rng == found[2].rng, axis=-1))
    fresh = on_host(more.init(PARAMS, model_state=model_state))
    keys = found[0].model_state["dropout"]
    np.testing.assert_array_equal(keys, fresh.model_state["dropout"])
    assert len(np.unique(keys, axis=0)) == 4


def test_copies_of_parameters_go_where_the_parameters_go(tmp_path):
    """Replicas weigh, so the consensus is not the plain mean, of which the optimizer has copies."""
    graph = js.topology.from_phone_book([[1, 3], [0, 2], [0, 3], [1, 0]])
    free = promoting(optax.contrib.schedule_free_sgd(0.1))
    steps = [
        make_step("sgp", n, sync=sync, optimizer=free, mode="traced")
        for n, sync in ((4, js.sgp("replica", graph=graph)), (2, js.sgp("replica")))
    ]
    state = trained(steps[0], steps[0].init(PARAMS, model_state=MODEL_STATE), 0, 3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, wait=True)
        found = checkpoints.restore(steps[1], PARAMS, model_state=MODEL_STATE).state
    assert np.ptp(np.float64(state.exchange.local.weight)) > 0.1
    before = state.opt_state.z["w"] - state.params["w"]
    wanted = np.mean(np.float64(before), axis=0)  # what the optimizer has in store stays a mean
    after = found.opt_state.z["w"] - found.params["w"]
    np.testing.assert_allclose(after, [wanted] * 2, atol=1e-6)
    plain = np.mean(np.float64(state.params["w"]), axis=0)
    assert np.abs(found.params["w"] - plain[None]).max() > 1e-4


# The same number

LAST = PERIOD + 1


@pytest.mark.parametrize("name", ["all_reduce", "slowmo over sgp", "diloco"])
def test_every_step_of_a_period_can_be_resumed(name, mesh_of, tmp_path):
    """Together they hold all kinds of state, in host mode and in traced mode."""
    mode = "host" if name == "slowmo over sgp" else "traced"
    step = make_step(name, mesh_of({"replica": 4}), mode=mode)
    state = step.init(PARAMS, model_state=MODEL_STATE, seed=3)
    with Checkpoints(tmp_path, keep=LAST) as checkpoints:
        for t in range(1, LAST + 1):
            state, _ = step(state, batch(t, 4))  # which donates what may still be written
            checkpoints.save(t, state, extra={"position": [t, {"a": None}]})
        undisturbed = leaf_bytes(state)
        for t in range(1, LAST):
            restored = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE, step=t)
            assert (restored.step, restored.is_exact, restored.notes) == (t, True, ())
            assert restored.extra == {"position": [t, {"a": None}]}
            state = trained(step, restored.state, t + 1, LAST + 1)
            assert leaf_bytes(state) == undisturbed, t
