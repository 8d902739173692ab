"""By default buckets follow the order in which the backward pass finishes the gradients."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxslowmo as js

# Used in the order c, a, b: the gradient of b is ready first, that of c last.
WIDTHS = {"c": (3, 5), "a": (5, 7), "b": (7, 2)}
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in WIDTHS.items()}
BATCH = jax.ShapeDtypeStruct((8, 3), jnp.float32)
SIZES = {name: a * b for name, (a, b) in WIDTHS.items()}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch @ params["c"])
    return jnp.mean((jnp.tanh(hidden @ params["a"]) @ params["b"]) ** 2)


def reduced_sizes(order, gradients, axes, loss_fn=loss_fn, **options):
    """Elements of each all-reduced buffer, in the order of the program."""
    step = js.make_train_step(
        loss_fn,
        optax.sgd(0.1),
        gradients=gradients,
        mesh=js.make_mesh(axes),
        order=order,
        **options,
    )
    state = jax.eval_shape(step.init, PARAMS)
    (traced,) = step.traced_by_phase(state, BATCH).values()
    found = re.findall(r"\}\) : \(tensor<(\d+)xf32>\) -> tensor<\1xf32>", traced.lower().as_text())
    return [int(n) for n in found]


def sizes(names):
    return [SIZES[name] for name in names]


def each_alone(**options):
    return js.all_reduce_gradients("replica", bucket_bytes=0, first_bucket_bytes=0, **options)


def test_buckets_follow_the_backward_pass():
    assert reduced_sizes("reverse", each_alone(), {"replica": 4}) == sizes("cba")
    assert reduced_sizes("ready", each_alone(), {"replica": 4}) == sizes("bac")


def test_the_default_is_the_order_of_the_backward_pass():
    assert reduced_sizes(None, each_alone(), {"replica": 4}) == sizes("bac")
    chain = js.chain(each_alone(), optax.clip(1.0))
    assert reduced_sizes(None, chain, {"replica": 4}, accumulate=2) == sizes("bac")
    named = each_alone(order=["c", "a", "b"])
    assert reduced_sizes(None, named, {"replica": 4}) == sizes("cab")
    # In the order of leaves one bucket would hold all.
    two = js.all_reduce_gradients("replica", first_bucket_bytes=4 * sum(sizes("ba")))
    assert reduced_sizes(None, two, {"replica": 4}) == [sum(sizes("ba")), *sizes("c")]
    assert reduced_sizes("reverse", two, {"replica": 4}) == [sum(sizes("cba"))]


def test_by_default_what_cannot_follow_the_backward_pass_keeps_the_order_of_leaves():
    # The buckets of a hook with state are those of `init`, which knows no order.
    hook = js.hooks.powersgd(1, start_step=2)
    assert reduced_sizes(None, each_alone(hook=hook), {"replica": 4})[:3] == sizes("cba")
    hidden = optax.chain(each_alone(), optax.clip(1.0))
    assert reduced_sizes(None, hidden, {"replica": 4}) == sizes("cba")


def test_by_default_one_bucket_needs_no_order():
    """Finding the order traces the loss once more, which one bucket does not need."""
    calls = []

    def counted(params, batch):
        calls.append(None)
        return loss_fn(params, batch)

    def num_calls(order, gradients):
        del calls[:]
        reduced_sizes(order, gradients, {"replica": 4}, loss_fn=counted)
        return len(calls)

    one = js.all_reduce_gradients("replica")
    assert num_calls(None, one) == num_calls("reverse", one) == num_calls("ready", one) - 1
    assert num_calls(None, each_alone()) == num_calls("ready", each_alone())


def test_a_chain_and_accumulated_gradients_too():
    chain = js.chain(each_alone(), optax.clip(1.0))
    assert reduced_sizes("ready", chain, {"replica": 4}) == sizes("bac")
    assert reduced_sizes("ready", each_alone(), {"replica": 4}, accumulate=2) == sizes("bac")


def test_an_order_that_is_given_stays():
    forward = each_alone(order="forward")
    assert reduced_sizes("ready", forward, {"replica": 4}) == sizes("abc")
    named = each_alone(order=["c", "a", "b"])
    assert reduced_sizes("ready", named, {"replica": 4}) == sizes("cab")


def test_the_order_found_by_hand():
    batch = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    order = js.ready_order(loss_fn, PARAMS, batch)
    assert order == (1, 0, 2)
    assert reduced_sizes("reverse", each_alone(order=order), {"replica": 4}) == sizes("bac")


def test_a_hook_with_state_needs_the_order_beforehand():
    hook = js.hooks.powersgd(1, start_step=2)
    with pytest.raises(ValueError, match=r"`hook` keeps state .* order=js\.ready_order"):
        reduced_sizes("ready", each_alone(hook=hook), {"replica": 4})


def test_other_orders_are_refused():
    with pytest.raises(ValueError, match='`order` must be "reverse" or "ready", got \'first\''):
        reduced_sizes("first", None, {"replica": 4})
    with pytest.raises(ValueError, match=r'`order`="ready" .*make_train_step\(order="ready"\)'):
        js.all_reduce_gradients("replica", order="ready")
