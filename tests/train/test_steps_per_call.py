"""`js.train_loop(steps_per_call=K)`: the loop of single calls, with K updates in one program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.small_loop import BATCHES, Note, make_step, start
from train.step.tables import DENSE
from train.step.tables import batches as batches_of_ids
from train.step.tables import step_of as step_with_tables

MANY = np.random.default_rng(1).normal(size=(11, 8, 3)).astype(np.float32)


class Positions:
    """An iterator with a position, that fills one array again and again."""

    def __init__(self, batches, position=0):
        self._batches, self._position = batches, position
        self._array = np.empty_like(batches[0])

    def __iter__(self):
        return self

    def __next__(self):
        if self._position == len(self._batches):
            raise StopIteration
        self._array[...] = self._batches[self._position]
        self._position += 1
        return {"x": self._array}

    def get_state(self):
        return {"position": self._position}


def step_of(mesh, mode, **options):
    return js.make_train_step(
        lambda p, b: (jnp.mean((jnp.tanh(b["x"]) @ p["w"] - 1) ** 2), {"mean": b["x"].mean(0)}),
        optax.adam(0.1),
        sync=js.slowmo("replica", base=js.local_sgd("replica"), sync_every=6),
        mesh=mesh,
        mode=mode,
        **options,
    )


def copied(result):
    """What a hook sees, whose buffers the next call donates."""
    return jax.tree.map(np.array, (result.state, result.last_metrics))


def same(found, wanted):
    """XLA of jax 0.12 adds in another order inside of a loop."""
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("mode", ["traced", "host"])
@pytest.mark.parametrize("kind", ["virtual", "devices"])
def test_results_are_those_of_single_calls(mesh_of, kind, mode, prefetch):
    axes = {"replica": 4}
    step = step_of(js.virtual_mesh(axes) if kind == "virtual" else mesh_of(axes), mode)
    single = {}
    for result in js.train_loop(step, start(step), Positions(MANY), hooks=[]):
        single[result.step] = *copied(result), result.phase, result.position
    notes, ends = [], []
    hooks = [Note("a", notes, every=5)]
    loop = js.train_loop(
        step, start(step), Positions(MANY), hooks=hooks, prefetch=prefetch, steps_per_call=4
    )
    for result in loop:
        first = result.step - result.num_updates + 1
        ends.append((first, result.step))
        state, metrics, phase, position = single[result.step]
        jax.tree.map(same, copied(result), (state, metrics))
        assert (result.phase, result.position) == (phase, position)
        for i, t in enumerate(range(first, result.step + 1)):
            of_update = jax.tree.map(lambda x, i=i: np.asarray(x[i]), result.metrics)
            jax.tree.map(same, of_update, single[t][1])
    assert ends == [(1, 4), (5, 5), (6, 9), (10, 10), (11, 11)]
    assert [step for _, step, _ in notes] == [5, 10]


def test_a_resumed_run_goes_on_to_the_bit():
    step = step_of(js.virtual_mesh({"replica": 4}), "traced", donate=False)
    options = {"num_steps": 10, "steps_per_call": 4}
    *_, whole = js.train_loop(step, start(step), Positions(MANY), **options)
    *_, half = js.train_loop(step, start(step), Positions(MANY), num_steps=6, steps_per_call=4)
    rest = Positions(MANY, **half.position)
    results = list(js.train_loop(step, half.state, rest, **options))
    assert [(r.step, r.num_updates) for r in results] == [(10, 4)]
    jax.tree.map(np.testing.assert_array_equal, results[-1].state, whole.state)


def test_the_log_and_the_evaluation_see_what_single_calls_show_them():
    step = make_step()

    def run(**options):
        written = []
        evaluate = js.train.Evaluate(lambda p, s: {"w": p["w"].sum()}, mesh=step.mesh, every=3)
        hooks = [evaluate, js.train.Log(written.append, every=2)]
        results = list(js.train_loop(step, start(step), BATCHES, hooks=hooks, **options))
        return written, {r.step: r.reports for r in results if r.reports}

    assert run(steps_per_call=10) == run()


def test_a_call_takes_no_batch_that_it_does_not_run():
    step, batches = make_step(), iter(BATCHES)
    loop = js.train_loop(step, start(step), batches, num_steps=5, steps_per_call=3)
    assert next(loop).step == 3
    assert len(list(batches)) == 3
    batches = iter(BATCHES)
    loop = js.train_loop(step, start(step), batches, num_steps=5, steps_per_call=3)
    assert [r.step for r in loop] == [3, 5]
    assert len(list(batches)) == 1


def test_a_call_ends_before_a_batch_of_another_shape_and_before_an_error():
    step = make_step()

    def batches():
        yield from BATCHES[:2]
        yield from jnp.asarray(BATCHES[2:5, :2])
        raise KeyError("lost")

    loop = js.train_loop(step, start(step), batches(), steps_per_call=4)
    assert [next(loop).step, next(loop).step] == [2, 5]
    with pytest.raises(KeyError, match="lost"):
        next(loop)
    loop = js.train_loop(step, start(step), BATCHES, num_steps=8, steps_per_call=4)
    assert [next(loop).step, next(loop).step] == [4, 6]
    with pytest.raises(ValueError, match="after 6 of `num_steps`=8"):
        next(loop)


def test_leaves_that_all_examples_share_and_a_new_state_of_a_hook():
    def loss(p, b):
        return b["scale"] * jnp.mean((b["x"] @ p["w"]) ** 2)

    step = js.make_train_step(
        loss, optax.sgd(0.1), sync=js.local_sgd("replica"), mesh=js.virtual_mesh({"replica": 2})
    )
    batches = [{"x": x, "scale": scale} for x, scale in zip(BATCHES, range(6), strict=True)]

    class Halve:
        every = 2

        def __call__(self, result):
            halved = jax.tree.map(lambda x: x / 2, result.state.params)
            result.state = result.state._replace(params=halved)

    def last(**options):
        *_, result = js.train_loop(step, start(step), batches, hooks=[Halve()], **options)
        return result.state

    jax.tree.map(np.testing.assert_array_equal, last(steps_per_call=4), last())


def test_the_step_of_another_library():
    def sgd(state, batch):
        grads = jax.grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(state)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        return new, {"norm": jnp.abs(grads["w"]).sum()}

    step = js.with_exchange(
        sgd,
        js.local_sgd("replica", sync_every=2),
        mesh=js.virtual_mesh({"replica": 2}),
        get_params=lambda s: s,
        set_params=lambda s, p: p,
    )
    *_, single = js.train_loop(step, start(step), BATCHES)
    *_, result = js.train_loop(step, start(step), BATCHES, steps_per_call=4)
    assert (result.step, result.num_updates, result.phase) == (6, 2, single.phase)
    jax.tree.map(np.testing.assert_array_equal, result.state, single.state)
    jax.tree.map(np.testing.assert_array_equal, result.last_metrics, single.metrics)


def weighted(step):
    shares = [list(BATCHES[:, :2]), list(BATCHES[:3, :2])]
    return js.train.uneven_batches(shares, mesh=step.mesh)


@pytest.mark.parametrize(
    ("match", "run"),
    [
        ("`steps_per_call` counts updates and must be an int >= 1", {"steps_per_call": 0}),
        ("`accumulate`=1, got 2", {"accumulate": 2}),
        ("js.train.WeightedBatch", {"batches": weighted}),
        ("without a wrapper, got MeasuredStep", {"step": js.reports.measured}),
        (
            "a js.TrainPipeline calls its own",
            {"step": lambda s: js.TrainPipeline(s, start(s), BATCHES)},
        ),
    ],
)
def test_refused_by_name(match, run):
    step = make_step()
    options = {"steps_per_call": 2, **run}
    batches = options.pop("batches", lambda step: BATCHES)(step)
    used = options.pop("step", lambda step: step)(step)
    given = () if isinstance(used, js.TrainPipeline) else (start(step), batches)
    with pytest.raises(ValueError, match=match):
        list(js.train_loop(used, *given, **options))


def test_tables_are_refused():
    step = step_with_tables(2, sync=js.local_sgd("replica"))
    with pytest.raises(ValueError, match=r"a step with `embeddings`.*without `steps_per_call`"):
        list(js.train_loop(step, step.init(DENSE), batches_of_ids(2), steps_per_call=2))


def test_a_pipeline_on_the_host_is_refused():
    mesh = js.make_mesh({"replica": 2, "stage": 2})
    params = [{"w": np.eye(8, dtype=np.float32)}] * 2
    model = js.LayeredModel([lambda p, x: x @ p["w"]] * 2, lambda x, batch: jnp.mean(x**2))
    pipe = js.pipelined(model, params, js.schedules.gpipe(2, 2), mesh=mesh, executor="host")
    step = js.make_train_step(pipe, optax.sgd(0.1), sync=js.local_sgd("replica"), mesh=mesh)
    batches = np.ones((2, 8, 8), np.float32)
    with pytest.raises(ValueError, match=r"`executor`=.host..*without `steps_per_call`"):
        list(js.train_loop(step, step.init(params), batches, steps_per_call=2))


@pytest.mark.parametrize("kind", ["virtual", "devices"])
@pytest.mark.parametrize("door", ["training step", "library"])
def test_batches_without_a_first_dimension_are_refused_by_their_shapes(mesh_of, kind, door):
    axes = {"replica": 4}
    mesh = js.virtual_mesh(axes) if kind == "virtual" else mesh_of(axes)
    if door == "library":
        step = js.with_exchange(
            lambda state, batch: (state, {"mean": batch["x"].mean()}),
            js.local_sgd("replica"),
            mesh=mesh,
            get_params=lambda s: s,
            set_params=lambda s, p: p,
        )
    else:
        step = step_of(mesh, "traced")
    state, batch = start(step), {"x": MANY[0]}
    with pytest.raises(ValueError, match=r"`batches` must .* shapes \(8, 3\), of which each of 8"):
        step.scan(state, batch)
    wrong = r"`batches` must have the same first dimension.* \[\(8,\), \(9,\)\]"
    with pytest.raises(ValueError, match=wrong):
        step.scan(state, batch | {"y": np.zeros((9, 3), np.float32)})
    step.scan(state, {"x": MANY})
