"""What layers are called with, and what losses and modules may be."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from support.layered import assert_close

WIDTH = 3
PARAMS = [jnp.full((2, WIDTH), 0.5), jnp.full((WIDTH, WIDTH), 0.3)]
BATCH = np.arange(8.0, dtype=np.float32).reshape(4, 2) / 8


def dense(params, x):
    return jnp.tanh(x @ params)


def noisy(params, x, *, key=None):
    y = dense(params, x)
    return y if key is None else y + jax.random.normal(key, y.shape)


def mean(x, _):
    return jnp.mean(x)


class Layer:
    def method(self, params, x, *, key=None):
        return noisy(params, x, key=key)


def wrapped(layer):
    """Return a layer whose own signature does not say what it takes."""

    def layer_with_any(params, x, **kwargs):
        return layer(params, x, **kwargs)

    return layer_with_any


def silent(params, x, key=None):
    """Take a key, and draw nothing."""
    return dense(params, x)


def scaled(scale, params, x, *, key=None):
    return scale * noisy(params, x, key=key)


def on_stages(mesh_of, model, params, executor, **options):
    """Return value and gradients on two stages, and check that evaluation gives this value."""
    pipe = js.pipelined(
        *(model, params, js.schedules.one_f_one_b(2, 2)),
        mesh=mesh_of({"stage": 2}),
        executor=executor,
    )
    stacked = pipe.layout.stack(params)
    compiled: Any = jax.jit if executor == "one_program" else (lambda fn: fn)
    has_aux = isinstance(jax.eval_shape(model, params, BATCH), tuple)
    value, grads = compiled(jax.value_and_grad(pipe, has_aux=has_aux))(stacked, BATCH, **options)
    assert_close(compiled(pipe)(stacked, BATCH, **options), value)
    return value, pipe.layout.unstack(grads)


# Which keywords a layer is given.

LAYERS: dict[str, tuple[Callable[..., Any], Any]] = {
    "method": (Layer().method, None),
    "partial": (functools.partial(scaled, 1.0), None),
    "key behind others": (lambda params, x, rate=0.5, key=None: noisy(params, x, key=key), None),
    "jit": (jax.jit(noisy), None),
    "third by position": (lambda params, x, key: noisy(params, x, key=key), None),
    "wraps in jit": (jax.jit(functools.wraps(noisy)(wrapped(noisy))), None),
    "said for all": (wrapped(noisy), ("key",)),
    "said for one": (wrapped(noisy), [(), ["key"]]),
    "said of a bound one": (functools.partial(noisy, key=None), [None, ("key",)]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_take_a_key_get_it(name):
    layer, takes = LAYERS[name]
    first = silent if takes == ("key",) else dense
    model = js.LayeredModel([first, layer], mean, takes=takes)
    known = js.LayeredModel([dense, noisy], mean)
    assert model.takes_key
    assert not model.takes_state
    assert model.takes[1] == ("key",)
    for key in (None, jax.random.key(3)):
        assert_close(model(PARAMS, BATCH, rng=key), known(PARAMS, BATCH, rng=key))


WITHOUT: dict[str, Callable[..., Any]] = {
    "named key first": lambda key, state, **kwargs: dense(key, state),
    "bound": functools.partial(noisy, key=None),
    "kwargs": wrapped(noisy),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_layers_that_take_no_key_get_none(name):
    model = js.LayeredModel([dense, WITHOUT[name]], mean)
    assert model.takes == ((), ())
    assert not model.takes_key
    assert not model.takes_state
    known = js.LayeredModel([dense, dense], mean)(PARAMS, BATCH)
    assert_close(model(PARAMS, BATCH, rng=jax.random.key(3)), known)


def test_builtins_without_a_signature_get_two_arguments():
    assert js.LayeredModel([max], lambda x, _: x)([2.0], 3.0) == 3


def test_layers_are_called_once_and_their_errors_are_raised_as_they_are():
    calls = []

    def layer(params, x, **kwargs):
        calls.append(sorted(kwargs))
        return dense(params, x, **kwargs)

    js.LayeredModel([layer], mean)(PARAMS[:1], BATCH, rng=jax.random.key(0))
    model = js.LayeredModel([layer], mean, takes=("key",))
    with pytest.raises(TypeError, match="keyword argument 'key'"):
        model(PARAMS[:1], BATCH, rng=jax.random.key(0))
    assert calls == [[], ["key"]]


def test_state_and_key_of_one_layer():
    def counting(params, x, **kwargs):
        state = kwargs.pop("state")
        return noisy(params, x, **kwargs), {"count": state["count"] + 1}

    model = js.LayeredModel([counting], mean, takes={"state", "key"})
    assert model.takes == (("key", "state"),)
    states = [{"count": jnp.zeros(())}]
    loss, (_, after) = model(PARAMS[:1], BATCH, rng=jax.random.key(0), model_state=states)
    known = js.LayeredModel([noisy], mean)(PARAMS[:1], BATCH, rng=jax.random.key(0))
    assert_close((loss, after), (known, [{"count": 1.0}]))


def test_equal_layers_that_take_different_keywords_are_not_one_run(mesh_of):
    """A run and a kind of stages are called with one set of keywords."""
    square, key = jnp.full((2, 2), 0.4), jax.random.key(5)
    takes = [(), *[("key",)] * 3, *[()] * 4]
    known = js.LayeredModel([noisy if names else dense for names in takes], mean)
    model = js.LayeredModel([noisy] * 8, mean, takes=takes)
    found = on_stages(mesh_of, model, [square] * 8, "one_program", rng=key)
    assert_close(found, on_stages(mesh_of, known, [square] * 8, "one_program", rng=key))


# What a loss returns: its function of the 4 x 3 outputs, and the value that it means.

LOSSES: dict[str, tuple[Callable[[jax.Array], Any], Any]] = {
    "float": (lambda x: 0.5, 0.5),
    "pair with bool": (lambda x: (x.sum() * 0 + 6, True), 6),
    "weight of 0": (lambda x: (x.sum() * 0, 0), 0),
    "metrics": (
        lambda x: (1.0, {"a": 0.5, "b": np.int64(4), "c": jnp.sum(x > 2), "d": (x.size, 8)}),
        (1, {"a": 0.5, "b": 4, "c": 0, "d": 1.5}),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_weights_and_metrics_become_float32(name):
    loss, expected = LOSSES[name]
    model = js.LayeredModel([dense, dense], lambda x, _: loss(x))
    found = model(PARAMS, BATCH)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(found))
    assert_close(found, jax.tree.map(np.float32, expected))


def test_stages_add_up_losses_of_all_kinds(mesh_of):
    def of_pair(x, _):
        metrics = {"a": 0.5, "b": np.int64(4), "c": jnp.sum(x > 2), "d": (jnp.sum(x > 0.2), x.size)}
        return (jnp.sum(x), np.int32(x.size)), {**metrics, "e": True}

    model = js.LayeredModel([dense, dense], of_pair)
    found = on_stages(mesh_of, model, PARAMS, "one_program")
    assert_close(found, jax.jit(jax.value_and_grad(model, has_aux=True))(PARAMS, BATCH))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(found))


def test_precision_is_kept():
    def kind(x):
        return js.LayeredModel([dense], lambda *_: x)(PARAMS[:1], BATCH).dtype

    assert kind(jnp.bfloat16(1)) == jnp.bfloat16
    with jax.enable_x64(True):
        assert (kind(np.float64(1)), kind(1.0)) == (np.float64, np.float32)


def test_the_arrays_of_modules_have_gradients(mesh_of):
    one, other = jax.random.split(jax.random.key(0))
    modules = [
        eqx.nn.MLP(2, WIDTH, 4, 1, key=one),
        eqx.nn.Linear(WIDTH, 2, use_bias=False, key=other),
    ]
    split = [eqx.partition(module, eqx.is_array) for module in modules]
    params = [arrays for arrays, _ in split]

    def of_module(static):
        return lambda params, x: jax.vmap(eqx.combine(params, static))(x)

    model = js.LayeredModel([of_module(static) for _, static in split], mean)
    value, grads = on_stages(mesh_of, model, params, "host")
    assert_close((value, grads), jax.jit(jax.value_and_grad(model))(params, BATCH))
    assert jax.tree.structure(grads) == jax.tree.structure(params)
