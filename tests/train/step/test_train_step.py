"""Tests of a step inside other programs, in threads, resumed, and on donated or sharded states."""

import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.train.step import _step_states
from train.step.problem import (
    BATCHES,
    KINDS,
    PARAMS,
    RATE,
    assert_close,
    loss,
    slow_over_local,
    train,
)

VIRTUAL = js.virtual_mesh({"replica": 2})


def step_of(mesh=VIRTUAL, **options):
    sync = js.local_sgd("replica", sync_every=3)
    return js.make_train_step(loss, optax.adam(0.1), mesh=mesh, **{"sync": sync, **options})


def state_after(step, state, batches=BATCHES[:3]):
    for batch in batches:
        state, _ = step(state, batch)
    return state


def assert_same(a, b):
    for x, y in zip(*map(jax.tree.leaves, (a.params, b.params)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


# Other programs around the step


@pytest.mark.parametrize("kind", ["devices", "virtual"])
def test_a_traced_step_inside_of_a_scan_gives_the_same_state(kind):
    mesh = {"devices": js.make_mesh, "virtual": js.virtual_mesh}[kind]({"replica": 2})
    step = step_of(mesh, donate=False)
    state = step.init(PARAMS)
    scanned, metrics = lax.scan(step, state, BATCHES[:3])
    assert_same(scanned, state_after(step, state))
    assert metrics["loss"].shape == (3, 2)
    assert jax.eval_shape(step, state, BATCHES[0])[0].params["w"].shape == (2, 8, 3)


@pytest.mark.parametrize("kind", ["devices", "virtual"])
def test_a_traced_step_inside_of_jit_gives_the_same_state(kind):
    mesh = {"devices": js.make_mesh, "virtual": js.virtual_mesh}[kind]({"replica": 4})
    sync = js.local_sgd("replica", sync_every=2)
    step = js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=mesh, donate=False)
    outside = inside = step.init(PARAMS)
    jitted = jax.jit(lambda state, batch: step(state, batch)[0])
    for batch in BATCHES[:2]:
        outside, inside = step(outside, batch)[0], jitted(inside, batch)
    assert_close(inside.params, outside.params)
    assert step.next_phase(inside) == ()


@pytest.mark.parametrize("explicit", [False, True])
def test_shards_inside_of_a_replica_stay_so_inside_of_another_program(explicit, mesh_of):
    mesh = mesh_of({"replica": 2, "fsdp": 4}, explicit=explicit)
    specs = {"b": P(), "w": P("fsdp")}
    placed = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), PARAMS, specs)
    sync = js.local_sgd("replica", sync_every=2, param_specs=specs)
    step = step_of(mesh, sync=sync, donate=False)
    state = step.init(placed)
    inside = jax.jit(lambda state: state_after(step, state))(state)
    outside = state_after(step, state)
    assert_same(inside, outside)
    wanted = NamedSharding(mesh, P("replica", "fsdp"))
    for after in (inside, outside, lax.scan(step, state, BATCHES[:3])[0]):
        assert after.params["w"].sharding.is_equivalent_to(wanted, 3)


@pytest.mark.parametrize(
    "use",
    [
        lambda step, state: jax.jit(step)(state, BATCHES[0]),
        lambda step, state: lax.scan(step, state, BATCHES[:3]),
        lambda step, state: jax.eval_shape(step, state, BATCHES[0]),
        lambda step, state: jax.jit(lambda s: step.next_phase(s) and 0)(state),
    ],
    ids=["jit", "scan", "eval_shape", "next_phase"],
)
def test_a_host_scheduled_step_inside_of_another_program_is_refused(use):
    step = step_of(mode="host")
    message = (
        r'`mode`="host", reads the counter .*inside of jax\.jit.*outside, or use mode="traced"'
    )
    with pytest.raises(ValueError, match=message):
        use(step, step.init(PARAMS))


# Threads


def result_in_thread(fn):
    """Return `fn()`, run in another thread from begin to end."""
    results = []
    thread = threading.Thread(target=lambda: results.append(fn()))
    thread.start()
    thread.join()
    return results[0]


def interleaved(fn, other):
    """Return `fn()`, and what `other()` returns in a thread before each line of the step's code."""
    results = []

    def on_line(frame, event, arg):
        if event == "line":
            results.append(result_in_thread(other))
        return on_line

    def on_call(frame, event, arg):
        return (
            on_line
            if frame.f_code.co_filename.endswith(
                ("_train_step.py", "_step_runner.py", "_step_states.py", "_placing.py")
            )
            else None
        )

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        return fn(), results
    finally:
        sys.settrace(before)


def test_two_threads_do_not_take_each_others_count():
    step = step_of(mode="host", donate=False)
    one = state_after(step, step.init(PARAMS), BATCHES[:1])
    two = state_after(step, one, BATCHES[:1])
    fresh = [s._replace(opt_state=jax.tree.map(jnp.copy, s.opt_state)) for s in (one, two)]
    for a, b in ((one, two), fresh):  # counts known on the host, and those to be read
        phase, others = interleaved(lambda a=a: step.next_phase(a), lambda b=b: step.next_phase(b))
        assert phase == ()
        assert set(others) == {("average",)}
    after, _ = interleaved(lambda: step(one, BATCHES[1])[0], lambda: step(two, BATCHES[1]))
    assert step.next_phase(after) == ("average",)
    assert_same(after, step(one, BATCHES[1])[0])


# Donation


@pytest.mark.parametrize("part", ["params", "opt_state", "rng"])
def test_a_state_of_which_another_program_donated_a_part_is_refused(part):
    """A step donates all of a state; running on a part would end the process in jax 0.10."""
    step = step_of(donate=False)
    state, _ = step(step.init(PARAMS), BATCHES[0])
    for x in jax.tree.leaves(getattr(state, part)):
        x.delete()
    calls = [lambda: step(state, BATCHES[0]), lambda: step.collect(state, BATCHES[0])]
    for call in calls:
        with pytest.raises(ValueError, match=r"`state` was given .*\(donate=True\)"):
            call()


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("kind", ["auto", "virtual"])
def test_a_step_deletes_the_old_state_only_if_it_donates(kind, donate):
    source = jax.tree.map(jnp.array, PARAMS)
    step = js.make_train_step(
        loss,
        optax.adam(0.1),
        sync=slow_over_local(),
        mesh=KINDS[kind]({"replica": 4}),
        donate=donate,
    )
    first = step.init(source)
    second, _ = step(first, BATCHES[0])
    assert {x.is_deleted() for x in jax.tree.leaves((first.params, first.opt_state))} == {donate}
    assert not any(x.is_deleted() for x in jax.tree.leaves((source, second)))


@pytest.mark.parametrize("mode", ["traced", "host"])
@pytest.mark.parametrize("kept", ["step", "params", "opt_state", "rng"])
def test_a_donated_state_is_refused(kept, mode):
    step = step_of(mode=mode)
    old = step.init(PARAMS)
    new, _ = step(old, BATCHES[0])
    mixed = new._replace(**{kept: getattr(old, kept)})
    for state in (old, mixed):
        with pytest.raises(ValueError, match=r"`state` was given .*\(donate=True\): go on with"):
            step(state, BATCHES[0])
        with pytest.raises(ValueError, match=r"`state` was given"):
            step.next_phase(state)
    assert np.isfinite(step(new, BATCHES[0])[1]["loss"]).all()


def test_programs_are_read_from_the_shapes_of_a_donated_state():
    step = step_of()
    old = step.init(PARAMS)
    step(old, BATCHES[0])
    assert step.compiled(old, BATCHES[0])
    assert step.traced_by_phase(old, BATCHES[0])


# Shards of the parameters


@pytest.fixture
def scanned_axes(monkeypatch):
    """Return the list of results of `model_axes`, one for each scan of a part of the state."""
    results = []
    real = _step_states.model_axes
    monkeypatch.setattr(
        _step_states, "model_axes", lambda *args: results.append(real(*args)) or results[-1]
    )
    return results


def test_leaves_are_scanned_once_in_a_run(scanned_axes):
    step = step_of()
    state = step(step.init(PARAMS), BATCHES[0])[0]
    scanned_axes.clear()
    for _ in js.train_loop(step, state, BATCHES):
        pass
    assert scanned_axes == []


def test_leaves_with_other_shards_are_noticed(scanned_axes):
    """Only one leaf is resharded at a time."""
    mesh = js.make_mesh({"replica": 2, "fsdp": 4})
    step = step_of(mesh, donate=False)
    state = state_after(step, step.init({**PARAMS, "c": np.ones(4, np.float32)}))
    for name, spec in (("c", P("replica", "fsdp")), ("w", P("replica", "fsdp"))):
        leaf = jax.device_put(state.params[name], NamedSharding(mesh, spec))
        state = state._replace(params={**state.params, name: leaf})
    after, _ = step(state, BATCHES[0])
    assert {"fsdp"} in scanned_axes
    assert after.params["w"].sharding.spec[:2] == ("replica", "fsdp")
    assert after.params["b"].sharding.is_equivalent_to(NamedSharding(mesh, P("replica")), 2)


def test_another_step_scans_the_leaves_again(scanned_axes):
    state = state_after(step_of(donate=False), step_of().init(PARAMS))
    scanned_axes.clear()
    step_of(js.virtual_mesh({"replica": 2, "device": 1})).compiled(state, BATCHES[0])
    assert set(scanned_axes) == {frozenset()}


# Runs that are resumed


@pytest.mark.parametrize(("mode", "numpy"), [("host", False), ("host", True), ("traced", False)])
def test_resuming_at_any_step_gives_the_same_bits(mode, numpy):
    def make():
        return js.make_train_step(
            loss,
            optax.sgd(RATE, momentum=0.9),
            sync=slow_over_local(),
            mesh=js.virtual_mesh({"replica": 2}),
            mode=mode,
        )

    def saved(state):
        copy = jax.tree.map(np.array, state._replace(rng=()))
        copy = copy if numpy else jax.tree.map(jnp.asarray, copy)
        return copy._replace(rng=jax.random.wrap_key_data(np.array(jax.random.key_data(state.rng))))

    whole, other = make(), make()
    state, saves, phases = whole.init(PARAMS), [], []
    for batch in BATCHES:
        saves.append(saved(state))
        phases.append(whole.next_phase(state))
        state, _ = whole(state, batch)
    assert phases == [(), ("average",), (), ("slow",), (), ("average",)]
    for t in (5, 3, 2):
        assert other.next_phase(saves[t]) == phases[t]
        resumed, _ = train(other, saves[t], BATCHES[t:])
        for a, b in zip(
            jax.tree.leaves(state.params), jax.tree.leaves(resumed.params), strict=True
        ):
            assert np.array_equal(a, b)
        assert np.array_equal(resumed.step, state.step)


@pytest.mark.parametrize(
    ("case", "mode"),
    [("auto", "host"), ("explicit", "traced"), ("virtual", "traced"), ("fsdp", "traced")],
)
def test_nothing_compiles_after_the_first_step_of_each_phase(case, mode, compilations):
    params = {"w": PARAMS["w"]}
    options = {}
    if case == "fsdp":
        mesh = js.make_mesh({"replica": 2, "fsdp": 4})
        params = {"w": jax.device_put(params["w"], NamedSharding(mesh, P("fsdp")))}
        options = {"param_specs": {"w": P("fsdp")}}
    else:
        mesh = KINDS[case]({"replica": 4})
    step = js.make_train_step(
        lambda p, b: loss({**p, "b": 0.0}, b),
        optax.adam(0.1),
        sync=slow_over_local(**options),
        mesh=mesh,
        mode=mode,
    )
    state = step.init(params)
    seen, compiled = set(), []
    for batch in (*BATCHES, *BATCHES):
        phase = step.next_phase(state)
        before = compilations.count
        state, _ = step(state, batch)
        if phase in seen or (seen and mode == "traced"):
            compiled.append(compilations.count - before)
        else:
            assert compilations.count > before
        seen.add(phase)
    assert sum(compiled) == 0
    assert len(step._runner.programs._programs) == (3 if mode == "host" else 1)


# Programs that were traced to be read


@pytest.mark.parametrize(("mode", "programs"), [("host", 3), ("traced", 1)])
@pytest.mark.parametrize("shapes_alone", [False, True])
def test_steps_run_the_programs_that_were_traced(mode, programs, shapes_alone):
    traces = 0

    def counted(params, batch):
        nonlocal traces
        traces += 1
        return loss(params, batch)

    base = js.local_sgd("replica", sync_every=2)
    step = js.make_train_step(
        counted,
        optax.sgd(0.1),
        sync=js.slowmo("replica", base=base, sync_every=4),
        mesh=js.make_mesh({"replica": 4}),
        mode=mode,
    )
    state = step.init(PARAMS)
    arguments = (state, BATCHES[0])
    if shapes_alone:
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)),
            arguments,
        )
    assert len(step.traced_by_phase(*arguments)) == programs
    assert traces == programs
    for _ in range(4):
        state, _ = step(state, BATCHES[0])
    assert traces == programs
