"""A model of layers equals the same written as one function; what it refuses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js

PARAMS = [{"w": jnp.full((2, 3), 0.5)}, {"w": jnp.full((3, 3), 0.3)}, {"w": jnp.full((3,), 2.0)}]
BATCH = {"x": np.arange(8.0, dtype=np.float32).reshape(4, 2), "y": np.ones(4, np.float32)}


def first(params, batch):
    return jnp.tanh(batch["x"] @ params["w"])


def middle(params, x):
    return jnp.tanh(x @ params["w"])


def last(params, x):
    return x @ params["w"]


def squared(output, batch):
    error = output - batch["y"]
    return jnp.mean(error**2), {"bias": jnp.mean(error)}


def model(**changed):
    return js.LayeredModel(changed.pop("layers", [first, middle, last]), squared, **changed)


def test_the_model_is_its_layers_one_after_the_other_and_the_loss():
    loss, metrics = model()(PARAMS, BATCH)
    output = np.tanh(np.tanh(BATCH["x"] @ PARAMS[0]["w"]) @ PARAMS[1]["w"]) @ PARAMS[2]["w"]
    np.testing.assert_allclose(loss, np.mean((output - 1) ** 2), rtol=1e-6)
    np.testing.assert_allclose(metrics["bias"], np.mean(output - 1), rtol=1e-6)


def test_stages_one_after_the_other_are_the_model():
    whole = model()
    x = whole.stage(0, 1)(PARAMS[:1], None, BATCH)
    assert x.shape == (4, 3)
    terms = whole.stage(1, 3)(PARAMS[1:], x, BATCH)
    assert terms.value(1) == whole(PARAMS, BATCH)


def test_a_step_takes_the_model_as_a_loss_function():
    value, grads = jax.value_and_grad(model(), has_aux=True)(PARAMS, BATCH)
    assert value[0].shape == ()
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, PARAMS)


def test_tied_leaves_have_the_first_ones_value_and_the_sum_of_the_gradients():
    def head(params, x):
        return (x @ params["inner"]["table"].T)[:, 0]

    layers, tied = [first, head], [((0, "w"), (1, "inner/table"))]
    params = [{"w": PARAMS[0]["w"]}, {"inner": {"table": jnp.zeros((2, 3))}}]
    grads = jax.grad(lambda p: model(layers=layers, tied=tied)(p, BATCH)[0])(params)

    def one_parameter(table):
        return squared(head({"inner": {"table": table}}, first({"w": table}, BATCH)), BATCH)[0]

    expected = jax.grad(one_parameter)(PARAMS[0]["w"])
    np.testing.assert_allclose(grads[0]["w"], expected, rtol=1e-6)
    np.testing.assert_allclose(grads[1]["inner"]["table"], expected, rtol=1e-6)


def test_layers_with_a_key_draw_their_own_and_the_same_again():
    def noisy(params, x, *, key):
        return x if key is None else x + jax.random.normal(key, x.shape)

    whole = js.LayeredModel([first, noisy, noisy], lambda x, _: jnp.mean(x))
    params, key = [PARAMS[0], {}, {}], jax.random.key(3)
    clean, drawn = whole(params, BATCH), whole(params, BATCH, rng=key)
    noise = [jax.random.normal(jax.random.fold_in(key, i), (4, 3)).mean() for i in (1, 2)]
    np.testing.assert_allclose(drawn, clean + sum(noise), rtol=1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: js.LayeredModel([], squared), "`layers` must hold at least one"),
        (lambda: js.LayeredModel(first, squared), "sequence of functions, got function"),
        (lambda: js.LayeredModel([first, 3], squared), "got int as layer 1"),
        (lambda: js.LayeredModel([first], None), "`loss` must be a function"),
        (lambda: model(tied=[((0, "w"), (7, "w"))]), "names layer 7; the model has 3"),
        (lambda: model(tied=[((0, "w"),)]), "at least two leaves"),
        (lambda: model(tied=[(0, 1)]), "groups of (layer, path)"),
        (lambda: model(tied=[((0, "w"), (1, "w")), ((1, "w"), (2, "w"))]), "each leaf once"),
        (lambda: model(tied=[((0, "w"), (1, "v"))])(PARAMS, BATCH), "'v' of layer 1, which has w"),
        (lambda: model(tied=[((0, "w"), (1, "w"))])(PARAMS, BATCH), "layer 1 is float32[3, 3]"),
        (lambda: model()(PARAMS[:2], BATCH), "3 of them, got 2"),
        (lambda: model()({"a": PARAMS}, BATCH), "got dict"),
        (lambda: js.LayeredModel([first], lambda x, _: x)(PARAMS[:1], BATCH), "return a scalar"),
        (
            lambda: js.LayeredModel([first], lambda x, _: (x.sum(), {"m": x}))(PARAMS[:1], BATCH),
            "a dict of metrics that are such",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()
