"""A run that goes on with another algorithm keeps what both remember; the rest is said."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from checkpoint.runs import MODEL_STATE, PARAMS, leaf_bytes, make_step, on_host, trained
from jaxslowmo.checkpoint import Checkpoints

SAVED = 5
INT8 = js.codecs.int8(block=16)


def slowmo(base, **options):
    return js.slowmo("replica", base=base, sync_every=4, momentum=0.5, **options)


def diloco(**options):
    return js.diloco("replica", sync_every=6, **options)


ALGORITHMS = {
    "local_sgd": lambda: js.local_sgd("replica", sync_every=2),
    "int8": lambda: js.local_sgd("replica", sync_every=2, codec=INT8),
    "sgp": lambda: js.sgp("replica", overlap=2),
    "noloco": lambda: js.noloco("replica", sync_every=2, graph=js.topology.ring),
    "slowmo": lambda: slowmo(js.local_sgd("replica", sync_every=2)),
    "own anchors": lambda: slowmo(js.sgp("replica"), exact_average=False),
    "late": lambda: diloco(delay=2),
    "fragments": lambda: diloco(fragments=2, codec=INT8),
}


def make(sync):
    return make_step("", 2, sync=sync)


def started(step):
    return step.init(PARAMS, model_state=MODEL_STATE)


def restored(folder, step):
    return Checkpoints(folder).restore(step, PARAMS, model_state=MODEL_STATE)


def saved(folder, sync, updates=SAVED):
    step = make(sync)
    state = trained(step, started(step), 0, updates)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(updates, state)
    return state


def shared(state):
    return on_host(state.exchange.shared)


def equal(*trees):
    jax.tree.map(np.testing.assert_array_equal, *trees)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("local_sgd", "late"), ("int8", "slowmo"), ("slowmo", "sgp"),
        ("own anchors", "fragments"), ("late", "noloco"), ("noloco", "own anchors"),
        ("sgp", "slowmo"), ("fragments", "int8"),
    ],
)  # fmt: skip
def test_a_run_goes_on_with_another_algorithm(name, other, tmp_path):
    state = saved(tmp_path, ALGORITHMS[name](), 0 if name == "own anchors" else SAVED)
    step = make(ALGORITHMS[other]())
    found = restored(tmp_path, step)
    assert not found.is_exact
    assert found.notes[-1].endswith(("is dropped.", "begins anew."))
    types = jax.tree.map(lambda x: (x.shape, x.dtype), found.state)
    assert types == jax.tree.map(lambda x: (x.shape, x.dtype), started(step))
    assert leaf_bytes(found.state._replace(exchange=())) == leaf_bytes(state._replace(exchange=()))
    # What replicas have together begins at their mean.
    if name in ("local_sgd", "int8"):
        anchor = shared(found.state)["anchor"]
        for leaf, x in on_host(state.params).items():
            np.testing.assert_allclose(anchor[leaf], np.float32(x).mean(0), rtol=1e-2)


def test_other_fragments_keep_moments_and_take_the_largest_count(tmp_path):
    """Of two fragments only the first has made a slow step, after three updates."""
    before, after = (diloco(fragments=n, outer_optimizer=optax.adam(0.1)) for n in (2, 1))
    state = saved(tmp_path, before, 3)
    found = restored(tmp_path, make(after))
    assert "other fragments" in " ".join(found.notes)
    many, one = shared(state), shared(found.state)
    equal(many["anchor"], one["anchor"])
    adam_state = one["outer"][0]
    equal(many["outer"].moments, (adam_state.mu, adam_state.nu))
    assert any(np.ptp(x) for x in jax.tree.leaves(adam_state.nu))
    assert [int(count) for (count,) in many["outer"].rest] == [1, 0]
    assert int(adam_state.count) == 1


def test_with_its_first_codec_a_run_measures_from_its_anchor(tmp_path):
    """Not from where replicas are, which would lose the way since the last slow step."""
    base = js.local_sgd("replica", sync_every=2)
    coded = js.local_sgd("replica", sync_every=2, codec=INT8)
    state = saved(tmp_path, js.only_finite(slowmo(base)))
    step = make(js.only_finite(slowmo(coded, codec=INT8, shard_state=True)))
    local = on_host(restored(tmp_path, step).state.exchange.local)["base"]
    anchor = shared(state)["anchor"]
    for replica in range(2):
        equal(jax.tree.map(lambda x: x[replica], local["sent"].reference), anchor)  # noqa: B023
    mean = jax.tree.map(lambda x: np.float32(x).mean(0), on_host(state.params))
    own = local["base"]["sent"].reference["w"][1]
    np.testing.assert_allclose(own, mean["w"], rtol=1e-6)
    assert np.abs(own - anchor["w"]).max() > 1e-4


def test_what_is_in_flight_arrives_with_the_same_delay_alone(tmp_path):
    state = saved(tmp_path, diloco(delay=2))
    parts = np.asarray(state.exchange.local["in_flight"][0].parts)
    assert parts.tolist() == [1, 1]  # taken after update 4, and half sent
    found = restored(tmp_path, make(diloco(delay=2)))
    assert found.is_exact
    found = restored(tmp_path, make(diloco(delay=2, codec=INT8)))
    assert "What was in flight is dropped." in found.notes
    for flight in found.state.exchange.local["in_flight"]:
        assert np.all(np.asarray(flight.parts) == -1)


# What codecs have not sent

TOP_K = js.codecs.top_k(0.2, chunk=64)
KINDS = {
    "float32": {"shard_state": True},
    "int8": {"codec": INT8, "shard_state": False},
    "int8, late": {"codec": INT8, "shard_state": True, "delay": 1},
    "float32 in fragments": {"fragments": 2},
    "top_k": {"codec": TOP_K, "shard_state": False},
    "top_k, sharded": {"codec": TOP_K, "shard_state": True},
    "int8, late fragments": {
        "codec": INT8, "shard_state": False, "fragments": 2, "delay": 1
    },
}  # fmt: skip


def made(kind, replicas):
    outer = optax.sgd(0.7, momentum=0.5)
    sync = js.diloco("replica", sync_every=4, outer_optimizer=outer, **KINDS[kind])
    return make_step(None, replicas, sync=sync)


def anchor(step, state):
    sync, x = state.exchange, state.params
    return on_host(js.read_anchor(step.sync, sync, x, mesh=step.mesh, axis_name="replica"))


def sums(state):
    """Return the mean of what replicas have not sent, by leaf; None if that is dropped."""
    sent = state.exchange.local.get("sent", ())
    leaves = jax.tree.leaves_with_path(sent.residual) if sent else []
    return {path[-1].key: np.float64(leaf).mean(0) for path, leaf in leaves}


@pytest.mark.parametrize(
    ("kind", "new_kind"),
    [
        ("int8, late", "int8, late"),
        ("float32", "top_k, sharded"),
        ("int8", "float32 in fragments"),
        ("top_k", "int8, late fragments"),
    ],
)
def test_a_run_goes_on_with_another_codec(kind, new_kind, tmp_path):
    step = made(kind, 4)
    state = trained(step, step.init(PARAMS, model_state=MODEL_STATE), 0, 7)
    before, lost = anchor(step, state), sums(state)
    # A leaf that stays whole is sent in full.
    assert any(np.any(x) for x in lost.values()) == (kind != "float32")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, state, wait=True)
        for replicas in (4, 3):
            new = made(new_kind, replicas)
            restored = checkpoints.restore(new, PARAMS, model_state=MODEL_STATE)
            if is_same := (kind, 4) == (new_kind, replicas):
                assert leaf_bytes(restored.state) == leaf_bytes(state)
            assert restored.is_exact == is_same
            for name, values in anchor(new, restored.state).items():
                np.testing.assert_allclose(values[0], before[name][0], rtol=1e-6, atol=1e-7)
            found = sums(restored.state)
            assert bool(found) == ("float32" not in new_kind)
            for name, values in found.items():
                wanted = lost.get(name, np.zeros_like(values))
                np.testing.assert_allclose(values, wanted, atol=1e-7, err_msg=name)
            text = " ".join(restored.notes)
            assert ("had not sent is dropped" in text) == (bool(lost) and not found)
            assert "in flight is dropped" not in text
        after = trained(new, restored.state, 7, 7 + 6)
    moved = [np.abs(v[0] - before[k][0]).max() for k, v in anchor(new, after).items()]
    assert all(0 < x < 1 for x in moved)
