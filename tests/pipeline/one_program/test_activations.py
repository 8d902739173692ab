"""One type of activations, or an error that names the stages and the types."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxslowmo as js
from jaxslowmo.pipeline.one_program._one_program import activations_of
from support.layered import language_model, tokens


def of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_leaves_without_cotangents_are_left_out_of_what_travels_back():
    (own,) = [activations_of([(of(2), {"n": of(3, dtype=jnp.int32)})] * 2)]
    assert [x.shape for x in own.types] == [(2,), (3,)]
    assert [x.shape for x in own.cotangents] == [(2,)]
    tree = own.cotangent_tree([jnp.ones(2)])
    assert tree[1] == {"n": None}
    assert len(own.flat_cotangents(tree)) == 1
    assert activations_of([]).types == ()


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([of(2), of(2), of(3)], "stage 0 gives float32[2], but stage 2 float32[3]"),
        ([of(2), of(2, dtype=jnp.bfloat16)], "stage 0 gives float32[2], but stage 1 bfloat16[2]"),
        ([of(2), (of(2),)], "stage 1 (float32[2],)"),
        ([{"a": of(2)}, {"b": of(2)}], "stage 0 gives {'a': float32[2]}, but stage 1 {'b'"),
    ],
)
def test_another_type_is_refused(results, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        activations_of(results)


def test_a_pipeline_says_so_when_it_sees_the_first_batch(mesh_of):
    model, params = language_model(4, tied=False)
    layers = [
        *model.layers[:3],
        lambda p, x: jnp.concatenate([x, x]),
        lambda p, x: x[:2],
        model.layers[5],
    ]
    model = js.LayeredModel(layers, model.loss)
    pipe = js.pipelined(model, params, js.schedules.gpipe(4, 4), mesh=mesh_of({"stage": 4}))
    # Layers [0, 1), [1, 3), [3, 4) and [4, 6).
    with pytest.raises(
        ValueError, match=re.escape("stage 0 gives float32[2, 4], but stage 2 float32[4, 4]")
    ):
        jax.eval_shape(pipe.loss_fn, pipe.layout.stack(params), tokens(8))
