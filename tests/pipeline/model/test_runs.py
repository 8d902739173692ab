"""Equal layers in a row are one loop: same losses, and programs that do not grow with them."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxslowmo as js
from support.layered import language_model, tokens


def test_programs_grow_neither_with_equal_layers_nor_with_microbatches(mesh_of):
    def length(blocks, microbatches):
        model, params = language_model(blocks)
        schedule = js.schedules.one_f_one_b(2, microbatches)
        pipe = js.pipelined(model, params, schedule, mesh=mesh_of({"stage": 2}))
        step = jax.jit(jax.value_and_grad(pipe, has_aux=True))
        text = step.lower(pipe.layout.types, tokens(2 * microbatches)).as_text()
        return len(text.splitlines())

    assert length(30, 4) == length(10, 64) == length(10, 4)
    assert length(4, 4) != length(10, 4)  # two layers are no loop


def test_layers_are_written_out_for_schedules_that_divide_backward_passes(mesh_of):
    model, params = language_model(10)
    num_loops = {}
    for kind in ("one_f_one_b", "zero_bubble"):
        schedule = js.schedules.by_name(kind, 2, 4)
        pipe = js.pipelined(model, params, schedule, mesh=mesh_of({"stage": 2}))
        grad = jax.jit(jax.grad(pipe, has_aux=True))
        text = grad.lower(pipe.layout.types, tokens(8)).as_text()
        num_loops[kind] = text.count("stablehlo.while")
    assert num_loops["zero_bubble"] == 1  # over the ticks
    assert num_loops["one_f_one_b"] > 1


def test_stages_of_layers_without_parameters_differ_by_their_number(mesh_of):
    """Four layers in a row are a loop, whose leaves, none, do not tell how many they are.

    Layers that change the type of what they are given are none.
    """

    def end(params, x):
        return x * params["w"]

    def twice(params, x):
        return 0.9 * jnp.concatenate([x, x], -1)

    def shrunk(params, x):
        return 0.9 * x

    layers = [end, *[twice] * 4, *[shrunk] * 5, end]
    model = js.LayeredModel(layers, lambda out, batch: jnp.mean(out))
    params = [{"w": np.float32(2)}, *[{}] * 9, {"w": np.float32(3)}]
    pipe = js.pipelined(
        model,
        params,
        js.schedules.gpipe(4, 2),
        mesh=mesh_of({"stage": 4}),
        parts=[[(0, 1)], [(1, 5)], [(5, 10)], [(10, 11)]],
    )
    batch = np.ones((4, 2), np.float32)
    np.testing.assert_allclose(jax.jit(pipe)(params, batch), model(params, batch), rtol=1e-6)
