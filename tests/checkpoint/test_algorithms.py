"""A run that goes on with another algorithm keeps what both remember; the rest is said."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from checkpoint.runs import MODEL_STATE, PARAMS, batch, leaf_bytes, make_step, on_host
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


def make(sync, replicas=2):
    return make_step("", replicas, sync=sync)


def trained(step, state, start, end):
    for t in range(start, end):
        state, _ = step(state, batch(t, len(state.step)))
    return state


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


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_goes_on_with_any_other_algorithm(name, tmp_path):
    state = saved(tmp_path, ALGORITHMS[name](), 0 if name == "own anchors" else SAVED)
    rest = state._replace(exchange=())
    for other in ALGORITHMS.keys() - {name}:
        for replicas in (2, 3):
            step = make(ALGORITHMS[other](), replicas)
            found = restored(tmp_path, step)
            assert not found.is_exact
            assert found.notes[-1].endswith(("is dropped.", "begins anew."))
            types = jax.tree.map(lambda x: (x.shape, x.dtype), found.state)
            assert types == jax.tree.map(lambda x: (x.shape, x.dtype), started(step))
            if replicas == 2:
                assert leaf_bytes(found.state._replace(exchange=())) == leaf_bytes(rest)
        # What replicas have together begins at their mean.
        if "anchor" in (new := shared(found.state)) and name in ("local_sgd", "int8", "sgp"):
            mean = jax.tree.map(lambda x: np.float32(x).mean(0), on_host(state.params))
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2), new["anchor"], mean
            )


@pytest.mark.parametrize("counts", [(1, 2), (2, 1)])
def test_other_fragments_keep_moments_and_take_the_largest_count(counts, tmp_path):
    """Of two fragments only the first has made a slow step, after three updates."""
    adam = {"outer_optimizer": optax.adam(0.1)}
    before, after = (diloco(fragments=n, **adam) for n in counts)
    state = saved(tmp_path, before, 3 if counts[0] == 2 else 7)
    found = restored(tmp_path, make(after))
    assert "other fragments" in " ".join(found.notes)
    many, one = (shared(x) for x in (state, found.state)[:: 1 if counts[0] == 2 else -1])
    equal(many["anchor"], one["anchor"])
    adam_state = one["outer"][0]
    equal(many["outer"].moments, (adam_state.mu, adam_state.nu))
    assert any(np.ptp(x) for x in jax.tree.leaves(adam_state.nu))
    numbers = [int(count) for (count,) in many["outer"].rest]
    assert int(adam_state.count) == 1
    assert numbers == ([1, 0] if counts[0] == 2 else [1, 1])
    on = trained(make(after), found.state, SAVED, SAVED + 6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(on_host(on.params)))


def test_another_outer_optimizer_in_other_fragments_begins_anew(tmp_path):
    saved(tmp_path, diloco(fragments=2, outer_optimizer=optax.adam(0.1)))
    momentum = diloco(outer_optimizer=optax.sgd(0.1, momentum=0.5))
    found = restored(tmp_path, make(momentum))
    assert not any(np.any(x) for x in jax.tree.leaves(shared(found.state)["outer"]))
    dropped, begun = found.notes
    assert "exchange/shared/outer/moments/0" in dropped
    assert "exchange/shared/outer/0/trace begins anew" in begun


@pytest.mark.parametrize("guarded", [False, True])
def test_with_its_first_codec_a_run_measures_from_its_anchor(guarded, tmp_path):
    """Not from where replicas are, which would lose the way since the last slow step."""

    def around(sync):
        return js.only_finite(sync) if guarded else sync

    base = js.local_sgd("replica", sync_every=2)
    coded = js.local_sgd("replica", sync_every=2, codec=INT8)
    state = saved(tmp_path, around(slowmo(base)))
    step = make(around(slowmo(coded, codec=INT8, shard_state=True)))
    local = on_host(restored(tmp_path, step).state.exchange.local)
    local = local["base"] if guarded else local
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
    for other in (diloco(), diloco(delay=2, codec=INT8)):
        found = restored(tmp_path, make(other))
        assert "What was in flight is dropped." in found.notes
        flights = found.state.exchange.local.get("in_flight", ())
        assert all(np.all(np.asarray(x.parts) == -1) for x in flights)
