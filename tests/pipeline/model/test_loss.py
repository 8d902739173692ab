"""Losses that are quotients of sums: equal however examples are divided."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.layered import assert_close, block, embed, head, language_model, tokens

_, PARAMS = language_model(2)


def masked(logits, batch):
    own = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["next"][:, None], 1)[:, 0]
    right = (jnp.argmax(logits, -1) == batch["next"]).astype(jnp.int32) * batch["mask"]
    count = jnp.sum(batch["mask"])
    own *= batch["mask"].astype(own.dtype)
    return (-jnp.sum(own), count), {"right": (jnp.sum(right), count)}


TIED = ((0, "table"), (3, "table"))
MODEL = js.LayeredModel([embed, block, block, head], masked, tied=[TIED])


def examples(count, seed=0):
    mask = np.random.default_rng(seed).random(count) < np.linspace(0.1, 0.9, count)
    return {**tokens(count, seed), "mask": mask.astype(np.int32)}


def check(pipe, model, *batches):
    run = jax.value_and_grad(pipe, has_aux=True)
    run = run if isinstance(pipe, js.pipeline.HostPipeline) else jax.jit(run)
    alone = jax.jit(jax.value_and_grad(model, has_aux=True))
    for batch in batches:
        found, grads = run(pipe.layout.stack(PARAMS), batch)
        known, expected = alone(PARAMS, batch)
        assert_close((found, pipe.layout.unstack(grads)), (known, expected))
    return found, grads


@pytest.mark.parametrize("executor", ["one_program", "host"])
def test_gradients_depend_neither_on_microbatches_nor_on_data_axes(mesh_of, executor):
    schedule, mesh = js.schedules.zero_bubble(2, 8), mesh_of({"stage": 2, "data": 2})
    pipe = js.pipelined(MODEL, PARAMS, schedule, mesh=mesh, data_axes="data", executor=executor)
    batch = examples(32)
    value, grads = check(pipe, MODEL, batch, {**batch, "mask": np.zeros(32, np.int32)})
    # Examples that all are masked weigh nothing.
    assert_close(value, (0.0, {"right": 0.0}))
    assert not any(np.any(x) for x in jax.tree.leaves(grads))


@pytest.mark.parametrize("executor", ["one_program", "host"])
def test_leaves_that_examples_share_reach_every_microbatch_whole(mesh_of, executor):
    def first(params, batch):
        return {"x": embed(params, batch), "scale": batch["scale"], "bias": batch["bias"]}

    def second(params, x):
        return {**x, "x": block(params, x["x"] * x["scale"] + x["bias"][:1])}

    model = js.LayeredModel([first, second, second, lambda p, x: head(p, x["x"])], masked)
    shared = {"scale": np.float32(0.5), "bias": np.ones((1, 4), np.float32)}
    mesh, schedule = mesh_of({"stage": 2, "data": 2}), js.schedules.one_f_one_b(2, 4)
    pipe = js.pipelined(model, PARAMS, schedule, mesh=mesh, data_axes="data", executor=executor)
    check(pipe, model, {**examples(16), **shared})


RATE = 0.5
SHAPES = {
    "replicas": ({"replica": 2, "stage": 2}, "replica", ()),
    "one stage": ({"replica": 2, "stage": 1}, "replica", ()),
    "parts by the pipeline": ({"replica": 2, "stage": 2, "data": 2}, "replica", ("data",)),
    "parts by the step": ({"replica": 2, "stage": 2, "data": 2}, ("replica", "data"), ("data",)),
    "parts the pipeline ignores": ({"replica": 2, "stage": 2, "data": 2}, ("replica", "data"), ()),
}


def quotient(params, batch):
    """The loss of all examples at once, in plain jax; the head has the table of the embedding."""
    x = embed(params[0], batch)
    for own in params[1:3]:
        x = block(own, x)
    (total, count), _ = masked(head({**params[3], "table": params[0]["table"]}, x), batch)
    return total / count.astype(total.dtype)


def stepped(params, batch):
    grads = jax.grad(quotient)(params, batch)
    first, *rest = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    return [first, *rest[:2], {**rest[2], "table": first["table"]}]


def joined(batches):
    return jax.tree.map(lambda *x: np.concatenate(x), *batches)


def pipes(name, executor, mesh):
    axes = SHAPES[name][2]
    schedule = js.schedules.one_f_one_b(mesh.shape["stage"], 2)
    specs = None
    if name == "parts by the pipeline":  # which gathers over these axes, so that it maps them
        specs = jax.tree.map(lambda x: P("data") if x.shape[0] % 2 == 0 else P(), PARAMS)
    return js.pipelined(
        MODEL, PARAMS, schedule, mesh=mesh, data_axes=axes, executor=executor, param_specs=specs
    )


@pytest.mark.parametrize("executor", ["one_program", "host"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("accumulate", "num_batches"), [(1, 1), (2, 3)])
def test_steps_have_the_quotient_of_the_whole_batch(
    mesh_of, name, executor, accumulate, num_batches
):
    sizes, over, _ = SHAPES[name]
    mesh = mesh_of(sizes)
    step = js.make_train_step(
        pipes(name, executor, mesh),
        optax.sgd(RATE),
        gradients=js.all_reduce_gradients(over),
        mesh=mesh,
        accumulate=accumulate,
    )
    state, window = step.init(PARAMS), None
    batches = [examples(16, seed) for seed in range(num_batches)]
    batches[0]["mask"][:4] = 0
    for batch in batches[:-1]:
        window, _ = step.collect(state, batch, window=window)
    state, metrics = step(state, batches[-1], window=window)
    assert_close(step.consensus(state), stepped(PARAMS, joined(batches)))
    assert_close(js.host_mean(metrics)["loss"], quotient(PARAMS, batches[-1]))
    assert_close(np.sum(metrics["loss_weight"]), np.float32(batches[-1]["mask"].sum()))


def test_a_model_without_stages_is_exact_in_a_step_and_local_updates_use_the_replicas_own():
    mesh, batch = js.virtual_mesh({"replica": 2}), examples(16)
    options = {"mesh": mesh, "accumulate": 2}
    averaged = js.make_train_step(
        MODEL, optax.sgd(RATE), gradients=js.all_reduce_gradients("replica"), **options
    )
    assert_close(
        averaged.consensus(averaged(averaged.init(PARAMS), batch)[0]), stepped(PARAMS, batch)
    )
    local = js.make_train_step(
        MODEL, optax.sgd(RATE), sync=js.local_sgd("replica", sync_every=1), **options
    )
    own = [stepped(PARAMS, jax.tree.map(lambda x, at=at: x[at : at + 8], batch)) for at in (0, 8)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *own)
    assert_close(local.consensus(local(local.init(PARAMS), batch)[0]), mean)


@pytest.mark.parametrize("executor", ["one_program", "host"])
def test_a_call_returns_a_scalar_and_each_replica_divides_by_its_own_weight(mesh_of, executor):
    mesh = mesh_of({"replica": 2, "stage": 2})
    pipe = pipes("replicas", executor, mesh)
    step = js.make_train_step(pipe, optax.sgd(RATE), sync="none", mesh=mesh)
    batch = examples(32)
    state, metrics = step(step.init(PARAMS), batch)
    parts = [jax.tree.map(lambda x, at=at: x[at : at + 16], batch) for at in (0, 16)]
    assert_close(metrics["loss"], np.array([quotient(PARAMS, part) for part in parts]))
    for r, part in enumerate(parts):
        assert jnp.shape(MODEL(PARAMS, part)[0]) == ()
        own = pipe.layout.unstack(jax.tree.map(lambda x, r=r: np.asarray(x)[r], state.params))
        assert_close(own, stepped(PARAMS, part))


def test_the_weight_joins_the_all_reduces_that_there_are(mesh_of):
    def mean(logits, batch):
        (total, _), metrics = masked(logits, batch)
        return total / 16, metrics

    mesh, batch, counts = mesh_of({"replica": 2, "stage": 2}), examples(16), []
    for loss in (masked, mean):
        model = js.LayeredModel(MODEL.layers, loss, tied=[TIED])
        pipe = js.pipelined(model, PARAMS, js.schedules.one_f_one_b(2, 2), mesh=mesh)
        gradients = js.all_reduce_gradients("replica")
        step = js.make_train_step(pipe, optax.sgd(RATE), gradients=gradients, mesh=mesh)
        report = js.comm_report(step, step.init(PARAMS), batch)
        counts.append([(row.collective, row.count) for row in report.select(level="compiled")])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("executor", ["one_program", "host"])
def test_parts_without_weight_count_for_nothing(mesh_of, executor):
    """Whole parts of `accumulate`, and then all of them."""
    mesh = mesh_of({"replica": 1, "stage": 2})
    pipe = pipes("replicas", executor, mesh)
    step = js.make_train_step(pipe, optax.sgd(RATE), mesh=mesh, accumulate=2, donate=False)
    batch, before = examples(16), step.init(PARAMS)
    batch["mask"][:8] = 0
    state, metrics = step(before, batch)
    assert_close(step.consensus(state), stepped(PARAMS, batch))
    assert_close(metrics["loss"], quotient(PARAMS, batch)[None])
    batch["mask"][:] = 0
    after, metrics = step(state, batch)
    assert_close((step.consensus(after), metrics["loss"]), (step.consensus(state), np.zeros(1)))
