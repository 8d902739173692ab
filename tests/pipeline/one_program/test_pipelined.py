"""A pipeline as a loss function: types, keys, derivatives, trees and meshes of its arguments."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from support.layered import assert_close

SCHEDULE = js.schedules.one_f_one_b(2, 4)


def mean_of_output(output, batch):
    return jnp.mean(output)


def pipeline(mesh_of, layers, params, **options):
    model, mesh = js.LayeredModel(layers, mean_of_output), mesh_of({"stage": 2})
    pipe = js.pipelined(model, params, SCHEDULE, mesh=mesh, **options)
    return pipe, pipe.layout.stack(params), model


def by_parts(model, batch):
    """Return the loss without stages, one microbatch at a time."""
    parts = [jax.tree.map(lambda x, m=m: x[2 * m : 2 * m + 2], batch) for m in range(4)]
    return lambda params: sum(model(params, x) for x in parts) / 4


def test_activations_may_be_trees_of_any_types(mesh_of):
    # bfloat16 values, integers and booleans travel; what has no cotangent gets none.
    def first(params, batch):
        x = (batch["x"] @ params["w"]).astype(jnp.bfloat16)
        return {"x": x, "count": jnp.arange(len(x)), "mask": (batch["x"][:, 0] > 0,)}

    def second(params, activations):
        x = activations["x"].astype(jnp.float32) @ params["w"]
        x = jnp.where(activations["mask"][0][:, None], x, 0)
        return x * activations["count"][:, None].astype(x.dtype)

    params = [{"w": jnp.eye(3)}, {"w": 2 * jnp.eye(3)}]
    pipe, stacked, model = pipeline(mesh_of, [first, second], params)
    batch = {"x": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)}
    loss, grads = jax.jit(jax.value_and_grad(pipe))(stacked, batch)
    expected, expected_grads = jax.jit(jax.value_and_grad(by_parts(model, batch)))(params)
    assert_close(loss, expected)
    assert_close(pipe.layout.unstack(grads), expected_grads, 1e-2)


def test_parameters_keep_their_dtypes_and_integers_get_no_gradient(mesh_of):
    def scaled(params, x):
        return x * params["scale"][None] + params["offset"][None].astype(x.dtype)

    leaf = {"scale": jnp.full(3, 2.0, jnp.bfloat16), "offset": jnp.arange(3)}
    params = [leaf, jax.tree.map(lambda x: x + 1, leaf)]
    pipe, stacked, model = pipeline(mesh_of, [scaled, scaled], params)
    batch = np.ones((8, 3), jnp.bfloat16)
    grads = jax.jit(jax.grad(pipe, allow_int=True))(stacked, batch)
    expected_grads = jax.grad(model, allow_int=True)(params, batch)
    assert grads["bfloat16"].dtype == jnp.bfloat16
    assert grads["int32"].dtype == jax.dtypes.float0
    for actual, expected in zip(np.asarray(grads["bfloat16"]), expected_grads, strict=True):
        assert_close(actual.astype(np.float32), expected["scale"].astype(np.float32), 1e-2)


def test_layers_may_sort_and_hold_loops_that_start_from_constants(mesh_of):
    def recurrent(params, x):
        return jax.lax.scan(lambda h, v: ((h + v) * params["w"], h), jnp.zeros(3), x)[1]

    def sorting(params, x):
        # jax types the indices, which start equal on all stages, by an equation of its own.
        x = x * params["w"][None]
        return jnp.sort(x) * jnp.take_along_axis(x, jnp.argsort(x), 1)

    params = [{"w": jnp.full(3, 0.5)}, {"w": jnp.array([1.0, -2.0, 3.0])}]
    pipe, stacked, model = pipeline(mesh_of, [recurrent, sorting], params)
    batch = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    loss, grads = jax.jit(jax.value_and_grad(pipe))(stacked, batch)
    expected = jax.jit(jax.value_and_grad(by_parts(model, batch)))(params)
    assert_close((loss, pipe.layout.unstack(grads)), expected)


def test_small_gradients_of_float16_survive_with_a_scale(mesh_of):
    def scaled(params, x):
        return x * params["w"][None]

    params = [{"w": np.full(64, 0.01, np.float16)}, {"w": np.full(64, 0.01, np.float16)}]
    batch = np.full((64, 64), 0.01, np.float16)

    def gradients(**options):
        pipe, stacked, _ = pipeline(mesh_of, [scaled] * 2, params, **options)
        cotangent = lambda s: 1024 * pipe(s, batch).astype(jnp.float32)  # noqa: E731
        return np.asarray(jax.jit(jax.grad(cotangent))(stacked)["float16"], np.float32)

    exact = 1024 * 0.01 * 0.01 / 64
    assert np.abs(gradients() - exact).max() > 0.1 * exact
    np.testing.assert_allclose(gradients(gradient_scale=2.0**10), exact, rtol=0.02)


def test_gradients_are_those_of_parameters_once_or_twice_and_of_the_loss_alone(mesh_of):
    def scaled(scale, x):
        return jnp.sin(x * scale)

    def steepness(loss):
        return lambda params, batch: jnp.sum(jax.grad(loss)(params, batch)["float32"] ** 2)

    layers, params = [scaled] * 2, [1.5, 0.5]  # numbers of Python, too
    batch = np.arange(8, dtype=np.float32)
    pipe, stacked, model = pipeline(mesh_of, layers, params)
    twice = jax.jit(jax.grad(steepness(pipe)))(stacked, batch)["float32"]
    without_stages = lambda of, batch: model(list(of["float32"][:, 0]), batch)  # noqa: E731
    assert_close(twice, jax.jit(jax.grad(steepness(without_stages)))(stacked, batch)["float32"])

    told = js.LayeredModel(layers, lambda x, _: (jnp.mean(x), {"most": jnp.max(x)}))
    pipe = js.pipelined(told, params, SCHEDULE, mesh=mesh_of({"stage": 2}))

    def summed(stacked):
        loss, metrics = pipe(stacked, batch)
        return 3 * loss + metrics["most"]

    expected = jax.grad(lambda p: 3 * model(p, batch))(params)
    assert_close(pipe.layout.unstack(jax.jit(jax.grad(summed))(stacked)), expected)
    alone = jax.jit(jax.grad(lambda s: pipe(s, batch)[1]["most"]))(stacked)
    assert not np.any(alone["float32"])


def test_layers_may_all_be_without_parameters(mesh_of):
    layers = [lambda params, x: x + 1.0, lambda params, x: x * 2.0]
    pipe, stacked, _ = pipeline(mesh_of, layers, [{}, None])
    loss, grads = jax.jit(jax.value_and_grad(pipe))(stacked, np.ones(8, np.float32))
    assert (loss, dict(grads.items())) == (4.0, {})


@pytest.mark.parametrize(
    ("axes", "executor"), [({"stage": 2}, "host"), ({"replica": 2, "stage": 2}, "one_program")]
)
def test_explicit_meshes_take_the_models_own_tree(axes, executor):
    devices = jax.devices()[: math.prod(axes.values())]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices)
    params = [{"w": np.full((3, 3), 0.1 * (i + 1), np.float32)} for i in range(4)]
    model = js.LayeredModel(
        [lambda p, x: jnp.tanh(x @ p["w"])] * 4, lambda out, batch: jnp.mean((out - batch) ** 2)
    )
    batch = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
    schedule = js.schedules.one_f_one_b(2, 2)
    pipe = js.pipelined(model, params, schedule, mesh=mesh, executor=executor)
    run = jax.value_and_grad(pipe)
    run = jax.jit(run) if executor == "one_program" else run
    expected = jax.jit(jax.value_and_grad(model))(params, batch)
    assert_close(run(params, batch), expected)
    if "replica" in axes:
        value, grads = run(pipe.layout.stack(params), batch)
        assert_close((value, pipe.layout.unstack(grads)), expected)
