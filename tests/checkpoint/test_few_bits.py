"""What codecs have not sent goes on in the same run, on other replicas, and in other parts."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from checkpoint.runs import MODEL_STATE, PARAMS, batch, leaf_bytes, make_step, on_host
from jaxslowmo.checkpoint import Checkpoints

CODECS = {
    "float32": None,
    "int8": js.codecs.int8(block=16),
    "float16": js.codecs.float16(),
    "top_k": js.codecs.top_k(0.2, chunk=64),
}
KINDS = {
    "whole": {"shard_state": False},
    "sharded": {"shard_state": True},
    "fragments": {"shard_state": True, "fragments": 2},
    "late fragments": {"shard_state": False, "fragments": 2, "delay": 1},
    "late": {"shard_state": True, "delay": 1},
}
SAVED = 7


def made(codec, kind, replicas):
    sync = js.diloco(
        "replica", sync_every=4, codec=CODECS[codec], outer_optimizer=optax.sgd(0.7, momentum=0.5),
        **KINDS[kind],
    )  # fmt: skip
    return make_step(None, replicas, sync=sync)


def trained(step, state, replicas, until, begin=0):
    for t in range(begin, until):
        state, _ = step(state, batch(t, replicas))
    return state


def anchor(step, state):
    sync, x = state.exchange, state.params
    return on_host(js.read_anchor(step.sync, sync, x, mesh=step.mesh, axis_name="replica"))


def sums(state):
    """Return the mean of what replicas have not sent, by leaf; None if that is dropped."""
    sent = state.exchange.local.get("sent", ())
    leaves = jax.tree.leaves_with_path(sent.residual) if sent else []
    return {path[-1].key: np.float64(leaf).mean(0) for path, leaf in leaves}


@pytest.mark.parametrize(
    ("codec", "kind", "new_codec", "new_kind"),
    [
        ("int8", "late", "int8", "late"),
        ("float32", "sharded", "top_k", "sharded"),
        ("int8", "whole", "float32", "fragments"),
        ("top_k", "whole", "int8", "late fragments"),
    ],
)
def test_a_run_goes_on_with_another_codec(codec, kind, new_codec, new_kind, tmp_path):
    step = made(codec, kind, 4)
    state = trained(step, step.init(PARAMS, model_state=MODEL_STATE), 4, SAVED)
    before, lost = anchor(step, state), sums(state)
    # A leaf that stays whole is sent in full.
    assert any(np.any(x) for x in lost.values()) == (codec != "float32")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(SAVED, state, wait=True)
        for replicas in (4, 3):
            new = made(new_codec, new_kind, replicas)
            restored = checkpoints.restore(new, PARAMS, model_state=MODEL_STATE)
            if is_same := (codec, kind, 4) == (new_codec, new_kind, replicas):
                assert leaf_bytes(restored.state) == leaf_bytes(state)
            assert restored.is_exact == is_same
            for name, values in anchor(new, restored.state).items():
                np.testing.assert_allclose(values[0], before[name][0], rtol=1e-6, atol=1e-7)
            found = sums(restored.state)
            assert bool(found) == (new_codec != "float32")
            for name, values in found.items():
                wanted = lost.get(name, np.zeros_like(values))
                np.testing.assert_allclose(values, wanted, atol=1e-7, err_msg=name)
            text = " ".join(restored.notes)
            assert ("had not sent is dropped" in text) == (bool(lost) and not found)
            assert "in flight is dropped" not in text
        after = trained(new, restored.state, 3, SAVED + 6, SAVED)
    moved = [np.abs(v[0] - before[k][0]).max() for k, v in anchor(new, after).items()]
    assert all(0 < x < 1 for x in moved)


def averages(codec, replicas, *, is_base):
    sync = js.local_sgd("replica", sync_every=4, codec=CODECS[codec])
    if is_base:
        sync = js.slowmo("replica", base=sync, sync_every=16, momentum=0.5, learning_rate=0.1)
    return make_step(None, replicas, sync=sync)


def sent_of(state):
    local = on_host(state.exchange.local)
    local = local["base"] if local and "base" in local else local
    return local["sent"] if local else ()


@pytest.mark.parametrize(
    ("codec", "new_codec", "is_base"),
    [("int8", "int8", True), ("float32", "int8", False), ("top_k", "float16", True)],
)
def test_averages_measure_from_where_they_were_or_from_the_mean(
    codec, new_codec, is_base, tmp_path
):
    step = averages(codec, 4, is_base=is_base)
    state = trained(step, step.init(PARAMS, model_state=MODEL_STATE), 4, SAVED)
    sent, saved = sent_of(state), on_host(state.params)
    mean = {name: np.float64(x).mean(0).astype(x.dtype) for name, x in saved.items()}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(SAVED, state, wait=True)
        for replicas in (4, 3):
            new = averages(new_codec, replicas, is_base=is_base)
            restored = checkpoints.restore(new, PARAMS, model_state=MODEL_STATE)
            if (codec, 4) == (new_codec, replicas):
                assert leaf_bytes(restored.state) == leaf_bytes(state)
            drops = (codec, new_codec) == ("top_k", "float16")
            assert ("had not sent is dropped" in " ".join(restored.notes)) == drops
            params, found = on_host(restored.state.params), sent_of(restored.state)
            for name in PARAMS:
                wanted = saved[name] if replicas == 4 else [mean[name]] * replicas
                np.testing.assert_allclose(params[name], wanted, rtol=1e-6)
                if found.residual:
                    lost = sent.residual[name].mean(0) if sent else 0
                    np.testing.assert_allclose(found.residual[name].mean(0), lost, atol=1e-9)
                view = sent.reference[name][0] if sent else mean[name]
                for reference in found.reference[name]:
                    np.testing.assert_allclose(reference, view, rtol=1e-6)
    # The next average makes replicas agree.
    after = on_host(trained(new, restored.state, replicas, SAVED + 1, SAVED).params)
    for name, x in after.items():
        np.testing.assert_allclose(x[1:], x[:-1], rtol=1e-5, atol=1e-6)
        assert 0 < np.abs(x[0] - mean[name]).max() < 1
