"""A step and its states: inside other programs, donated, copied, evaluated, and what compiles."""

import copy
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from train.step.problem import BATCHES, KINDS, PARAMS, assert_close, loss, train

VIRTUAL = js.virtual_mesh({"replica": 2})


def step_of(mesh=VIRTUAL, **options):
    sync = js.local_sgd("replica", sync_every=3)
    return js.make_train_step(loss, optax.adam(0.1), mesh=mesh, **{"sync": sync, **options})


def test_a_traced_step_inside_of_other_programs_gives_the_same_state():
    """Shards inside of a replica stay so."""
    mesh, specs = KINDS["explicit"]({"replica": 2, "fsdp": 4}), {"b": P(), "w": P("fsdp")}
    params = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in PARAMS.items()}
    step = step_of(mesh, donate=False)
    state = step.init(params)
    outside, _ = train(step, state, BATCHES[:3])
    inside = jax.jit(lambda state: train(step, state, BATCHES[:3])[0])(state)
    scanned, metrics = lax.scan(step, state, BATCHES[:3])
    assert metrics["loss"].shape == (3, 2)
    for found in (inside, scanned):
        assert_close(found.params, outside.params)
        assert step.next_phase(found) == step.next_phase(outside) == ()
        lies = NamedSharding(mesh, P("replica", "fsdp"))
        assert found.params["w"].sharding.is_equivalent_to(lies, 3)
    assert jax.eval_shape(step, state, BATCHES[0])[0].params["w"].shape == (2, 8, 3)
    step = step_of(mode="host")
    with pytest.raises(ValueError, match='`mode`="host"'):
        jax.eval_shape(step, step.init(PARAMS), BATCHES[0])


@pytest.mark.parametrize("mode", ["traced", "host"])
def test_a_donated_state_is_refused_and_still_tells_its_shapes(mode):
    source, step = jax.tree.map(jnp.array, PARAMS), step_of(mode=mode)
    old = step.init(source)
    new, _ = step(old, BATCHES[0])
    assert all(x.is_deleted() for x in jax.tree.leaves((old.params, old.opt_state)))
    assert not any(x.is_deleted() for x in jax.tree.leaves((source, new)))
    for state in (old, new._replace(params=old.params), new._replace(opt_state=old.opt_state)):
        for use in (step.next_phase, lambda state: step(state, BATCHES[0])):
            with pytest.raises(ValueError, match="`state`"):
                use(state)
    assert np.isfinite(step(new, BATCHES[0])[1]["loss"]).all()
    if mode == "traced":
        assert step.traced_by_phase(old, BATCHES[0])
    step = step_of(mode=mode, donate=False)
    state = step.init(source)
    step(state, BATCHES[0])
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


@pytest.mark.parametrize(("case", "mode"), [("auto", "host"), ("fsdp", "traced")])
def test_nothing_compiles_after_the_first_step_of_each_phase(case, mode, compilations):
    """Nor is anything traced again that was traced to be read, of arrays or of shapes alone."""
    params, specs, traces = {"w": PARAMS["w"]}, None, []
    if case == "fsdp":
        mesh, specs = js.make_mesh({"replica": 2, "fsdp": 4}), {"w": P("fsdp")}
        params = {"w": jax.device_put(params["w"], NamedSharding(mesh, specs["w"]))}
    else:
        mesh = KINDS[case]({"replica": 4})

    def counted(params, batch):
        traces.append(None)
        return loss({**params, "b": jnp.zeros(3)}, batch)

    base = js.local_sgd("replica", sync_every=2)
    sync = js.slowmo("replica", base=base, sync_every=4)
    step = js.make_train_step(counted, optax.adam(0.1), sync=sync, mesh=mesh, mode=mode)
    state, programs = step.init(params), 3 if mode == "host" else 1
    arguments = state, BATCHES[0]
    if case == "auto":
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)),
            arguments,
        )
    assert len(step.traced_by_phase(*arguments)) == programs
    seen = set()
    for batch in (*BATCHES, *BATCHES):
        phase, before = step.next_phase(state), compilations.count
        state, _ = step(state, batch)
        is_new = phase not in seen and (not seen or mode == "host")
        assert (compilations.count > before) == is_new
        seen.add(phase)
    assert len(traces) == programs


def test_a_run_reads_the_counter_once():
    """Those of later states follow from it; of a state that comes from elsewhere it is read."""
    step = step_of(mode="host", donate=False)
    state, _ = train(step, step.init(PARAMS), BATCHES)
    reads, real = [], type(state.step).__array__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(state.step), "__array__", lambda x, *a, **o: reads.append(x) or real(x, *a, **o)
        )
        for _ in js.train_loop(step, state, list(BATCHES[:4])):
            pass
    assert {x.tolist()[0] for x in reads} == {6}  # by the loop, which counts on from there
    fresh = jax.tree.map(jnp.copy, state)
    assert step.next_phase(fresh) == ()
    assert step.next_phase(step(fresh, BATCHES[0])[0]) == ()


def drawing(params, batch, *, rng, model_state):
    metrics = {"drawn": jax.random.uniform(rng), "seen": model_state["count"]}
    return loss(params, batch), (metrics, {"count": model_state["count"] + 1})


def test_an_evaluation_draws_as_the_next_update_and_changes_nothing():
    """It sees the model state that training would see."""
    sync = js.local_sgd("replica", sync_every=9)
    options = {"sync": sync, "mesh": js.make_mesh({"replica": 2}), "model_state": "broadcast"}
    step = js.make_train_step(drawing, optax.adam(0.1), **options)
    state, _ = step(step.init(PARAMS, model_state={"count": jnp.zeros(())}), BATCHES[0])
    state = state._replace(model_state={"count": jnp.arange(2.0)})
    before = jax.tree.map(np.asarray, state)
    found = step.evaluate(state, BATCHES[1])
    jax.tree.map(np.testing.assert_array_equal, state, before)
    assert found["seen"].tolist() == [0, 0]
    _, wanted = step(state, BATCHES[1])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, wanted)
    with pytest.raises(ValueError, match="`state`"):  # it was donated
        step.evaluate(state, BATCHES[0])


def test_copies_train_on_and_nothing_of_a_state_is_kept():
    step = step_of(mode="host", donate=False)
    state = step.init(PARAMS)
    for batch in BATCHES[:3]:
        state, _ = step(state, batch)
    wanted = jax.tree.map(np.asarray, step(state, BATCHES[3])[0].params)
    for other in (copy.copy(state), copy.deepcopy(state), state._replace(rng=state.rng)):
        assert_close(step(other, BATCHES[3])[0].params, wanted, atol=0)
    leaves = [weakref.ref(x) for x in jax.tree.leaves((state.params, state.opt_state))]
    del state, other
    gc.collect()
    assert not any(leaf() is not None for leaf in leaves)


def test_the_optimizers_state_of_one_copy_goes_on_on_every_replica():
    """A state of another optimizer is refused by name, before anything runs."""
    step, params = step_of(), {"w": jnp.ones(3)}
    known = optax.adam(0.1).init(params)
    known = (known[0]._replace(mu={"w": jnp.arange(3.0)}), *known[1:])
    state = step.init(params, opt_state=known)
    assert np.asarray(state.opt_state[0].mu["w"]).tolist() == [[0, 1, 2]] * 2
    with pytest.raises(ValueError, match="`opt_state` must be that of one copy"):
        step.init(params, opt_state=optax.sgd(0.1).init(params))
