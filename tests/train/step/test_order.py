"""By default buckets follow the order in which the backward pass finishes the gradients."""

import re

import jax
import jax.numpy as jnp
import optax

import jaxslowmo as js

# Used in the order c, a, b: the gradient of b is ready first, that of c last.
WIDTHS = {"c": (3, 5), "a": (5, 7), "b": (7, 2)}
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in WIDTHS.items()}
BATCH = jax.ShapeDtypeStruct((8, 3), jnp.float32)


def loss_fn(params, batch):
    hidden = jnp.tanh(batch @ params["c"])
    return jnp.mean((jnp.tanh(hidden @ params["a"]) @ params["b"]) ** 2)


def reduced(gradients, loss_fn=loss_fn, **options):
    """Names of the leaves in each all-reduced buffer, in the order of the program."""
    names = {a * b: name for name, (a, b) in WIDTHS.items()} | {49: "ba", 64: "cba"}
    step = js.make_train_step(
        loss_fn, optax.sgd(0.1), gradients=gradients, mesh=js.make_mesh({"replica": 2}), **options
    )
    (traced,) = step.traced_by_phase(jax.eval_shape(step.init, PARAMS), BATCH).values()
    found = re.findall(r"\}\) : \(tensor<(\d+)xf32>\) -> tensor<\1xf32>", traced.lower().as_text())
    return [names[int(n)] for n in found if int(n) in names]


def each_alone(**options):
    return js.all_reduce_gradients("replica", bucket_bytes=0, first_bucket_bytes=0, **options)


def test_buckets_follow_the_backward_pass_unless_they_are_told_or_cannot():
    batch = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert js.gradients.ready_order(loss_fn, PARAMS, batch) == (1, 0, 2)
    assert reduced(each_alone()) == [*"bac"]
    assert reduced(js.chain(each_alone(), optax.clip(1.0)), accumulate=2) == [*"bac"]
    assert reduced(each_alone(order="reverse")) == [*"cba"]
    assert reduced(each_alone(order=["c", "a", "b"])) == [*"cab"]
    # In the order of leaves one bucket would hold all.
    options = {"first_bucket_bytes": 4 * (7 * 2 + 5 * 7)}
    assert reduced(js.all_reduce_gradients("replica", **options)) == ["ba", "c"]
    assert reduced(js.all_reduce_gradients("replica", order="reverse", **options)) == ["cba"]
    # The buckets of a hook with state are those of `init`, which knows no order.
    hook = js.hooks.powersgd(1, start_step=2)
    assert reduced(each_alone(hook=hook))[:3] == [*"cba"]
    assert reduced(optax.chain(each_alone(), optax.clip(1.0))) == [*"cba"]
