"""What a hook is given, and what it may be and return."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from support.bad_input import one_update, trace

PARAMS = {"b": jnp.ones((4, 2)), "half": jnp.ones((4, 3), jnp.bfloat16), "w": jnp.ones((4, 3, 2))}


def reduction(hook, **layout):
    return one_update(js.all_reduce_gradients("replica", hook=hook, **layout))


def test_a_hook_sees_what_is_in_its_bucket():
    seen = []

    def look(bucket):
        seen.append(bucket)
        return jax.lax.pmean(bucket.flat, bucket.axis_name)

    grads = {
        "a": np.ones((4, 40, 50), np.float32),
        "b": np.ones((4, 3), np.float32),
        "c": np.ones((4, 2), np.float16),
    }
    layout = {"bucket_bytes": 4096, "first_bucket_bytes": 12, "split_large": True}
    trace(reduction(js.hooks.stateless(look), **layout), grads)
    named = [[(p.name, p.start, p.stop, p.is_whole) for p in b.pieces] for b in seen]
    assert named == [
        [("b", 0, 3, True)],
        [("a", 0, 1024, False)],
        [("c", 0, 2, True)],  # left over, like the next; float16 was seen first
        [("a", 1024, 2000, False)],
    ]
    assert [b.index for b in seen] == [0, 1, 2, 3]
    assert [b.is_last for b in seen] == [False, False, False, True]
    assert [b.dtype.name for b in seen] == ["float32", "float32", "float16", "float32"]
    assert [p.part_shape for b in seen for p in b.pieces] == [(3,), (1024,), (2,), (976,)]


def test_what_stands_behind_the_last_gradient_is_left_out():
    def padded(bucket):
        first, *_ = bucket.split(jnp.concatenate([bucket.flat, jnp.zeros(5, bucket.dtype)]))
        assert first.shape == bucket.pieces[0].part_shape
        return jax.lax.pmean(bucket.flat, bucket.axis_name)

    trace(reduction(js.hooks.stateless(padded)), PARAMS)


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (js.hooks.fp16_compress(), r"fp16_compress: .* got bfloat16 \(half\)"),
        (
            js.hooks.stateless(lambda b: b.flat[:-1]),
            r"reduced bucket must be \(8,\) float32 as the bucket is, got \(7,\) float32",
        ),
        (js.hooks.stateless(lambda b: b.flat.astype(jnp.float16)), r"got \(8,\) float16"),
        (js.hooks.stateless(lambda b: b.flat[None]), r"got \(1, 8\) float32"),
    ],
)
def test_a_hook_that_returns_something_else_is_refused(hook, said):
    with pytest.raises(ValueError, match=said):
        trace(reduction(hook), PARAMS)


@pytest.mark.parametrize("wrap", [js.hooks.fp16_compress, js.hooks.bf16_compress])
def test_wrappers_of_something_else(wrap):
    with pytest.raises(
        ValueError, match=r"compress: `hook` must be a js\.hooks\.CommHook.* got <lambda>"
    ):
        wrap(lambda bucket: bucket)


def test_stateless_needs_a_function():
    with pytest.raises(ValueError, match="`reduce` must be callable, got int"):
        js.hooks.stateless(3)


def test_a_hook_outside_of_the_axis():
    tx = js.all_reduce_gradients("replica", hook=js.hooks.int8())
    with pytest.raises(ValueError, match=r"`axis_name` 'replica' is not a mapped axis.*js\.init"):
        tx.init(jax.tree.map(lambda x: x[0], PARAMS))
