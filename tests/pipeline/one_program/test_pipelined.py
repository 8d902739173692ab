"""A pipeline as a loss function: types, keys, derivatives, trees and meshes of its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0

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


def test_a_loss_that_is_a_pair_is_the_quotient_of_its_sums(mesh_of):
    layers = [lambda params, x: x @ params] * 2
    model = js.LayeredModel(layers, lambda out, batch: (jnp.sum(out), jnp.sum(batch[:, 0])))
    params, batch = [np.eye(3, dtype=np.float32)] * 2, np.random.default_rng(0).random((8, 3))
    pipe = js.pipelined(model, params, SCHEDULE, mesh=mesh_of({"stage": 2}))
    loss = pipe(params, batch.astype(np.float32))
    np.testing.assert_allclose(loss, batch.sum() / batch[:, 0].sum(), rtol=1e-5)


def test_activations_and_parameters_may_be_trees_of_any_types(mesh_of):
    # bfloat16 values, integers and booleans travel; what has no cotangent gets none.
    def first(params, batch):
        x = (batch["x"] @ params["w"].astype(jnp.float32)).astype(jnp.bfloat16)
        return {"x": x, "count": jnp.arange(len(x)), "mask": (batch["x"][:, 0] > 0,)}

    def second(params, activations):
        x = activations["x"].astype(jnp.float32) @ params["w"]
        x = jnp.where(activations["mask"][0][:, None], x, 0)
        return x * activations["count"][:, None].astype(x.dtype)

    params = [{"w": jnp.eye(3, dtype=jnp.bfloat16)}, {"n": jnp.int32(7), "w": 2 * jnp.eye(3)}]
    pipe, stacked, model = pipeline(mesh_of, [first, second], params)
    batch = {"x": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)}
    run = jax.value_and_grad(pipe, allow_int=True)
    loss, grads = jax.jit(run)(stacked, batch)
    by_hand = jax.value_and_grad(by_parts(model, batch), allow_int=True)
    expected, (of_first, of_second) = jax.jit(by_hand)(params)
    assert_close(loss, expected)
    dtypes = {name: x.dtype for name, x in grads.items()}
    assert dtypes == {"bfloat16": jnp.bfloat16, "float32": jnp.float32, "int32": float0}
    for name, wanted in (("bfloat16", of_first["w"]), ("float32", of_second["w"])):
        found = np.asarray(grads[name], np.float32).sum(0)
        assert_close(found, np.asarray(wanted, np.float32).ravel(), 1e-2)


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


def test_gradients_may_be_differentiated_again(mesh_of):
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


def test_explicit_meshes_take_the_models_own_tree():
    """As `jax.make_mesh` of jax 0.12 makes them; the host's are in `host/`."""
    mesh = jax.make_mesh((2, 2), ("replica", "stage"), devices=jax.devices()[:4])
    params = [{"w": np.full((3, 3), 0.1 * (i + 1), np.float32)} for i in range(4)]
    model = js.LayeredModel([lambda p, x: jnp.tanh(x @ p["w"])] * 4, mean_of_output)
    batch = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
    pipe = js.pipelined(model, params, js.schedules.one_f_one_b(2, 2), mesh=mesh)
    run = jax.jit(jax.value_and_grad(pipe))
    expected = jax.jit(jax.value_and_grad(model))(params, batch)
    assert_close(run(params, batch), expected)
    value, grads = run(pipe.layout.stack(params), batch)
    assert_close((value, pipe.layout.unstack(grads)), expected)
