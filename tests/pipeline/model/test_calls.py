"""What layers are called with, and what losses may return."""

import functools
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxslowmo as js
from support.layered import assert_close

EXECUTORS = ["one_program", "host"]
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
    def __call__(self, params, x, *, key=None):
        return noisy(params, x, key=key)

    def method(self, params, x, *, key=None):
        return noisy(params, x, key=key)


def wrapped(layer):
    def layer_with_any(params, x, **kwargs):
        return layer(params, x, **kwargs)

    return layer_with_any


def scaled(scale, params, x, *, key=None):
    return scale * noisy(params, x, key=key)


def both(mesh_of, model, params, executor, batch=BATCH, **options):
    """Value and gradients of a pipeline of two stages, and of the whole model."""
    pipe = js.pipelined(
        *(model, params, js.schedules.one_f_one_b(2, 2)),
        mesh=mesh_of({"stage": 2}),
        executor=executor,
    )
    stacked = pipe.layout.stack(params)
    compiled: Any = jax.jit if executor == "one_program" else (lambda fn: fn)
    has_aux = isinstance(model(params, batch), tuple)
    of_pipe = compiled(jax.value_and_grad(pipe, has_aux=has_aux))(stacked, batch, **options)
    evaluated = compiled(pipe)(stacked, batch, **options)
    assert_close(evaluated, of_pipe[0])
    return (of_pipe[0], pipe.layout.unstack(of_pipe[1])), evaluated


# Which keywords a layer is given.


@pytest.mark.parametrize("name", ["key", "state", "params_first"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_positional_arguments_may_have_the_names_of_keywords(mesh_of, name, executor):
    layer = {
        "key": lambda params, key: dense(params, key),
        "state": lambda params, state: dense(params, state),
        "params_first": lambda key, state, **kwargs: dense(key, state),
    }[name]
    model = js.LayeredModel([dense, layer], mean)
    assert not model.takes_key
    assert not model.takes_state
    found, _ = both(mesh_of, model, PARAMS, executor, rng=jax.random.key(0))
    known = jax.value_and_grad(js.LayeredModel([dense, dense], mean))(PARAMS, BATCH)
    assert_close(found, known)


LAYERS: dict[str, Callable[..., Any]] = {
    "method": Layer().method,
    "callable": Layer(),
    "partial": functools.partial(scaled, 1.0),
    "partial by name": functools.partial(
        lambda params, x, rate, *, key: noisy(params, x, key=key), rate=2
    ),
    "key behind others": lambda params, x, rate=0.5, key=None: noisy(params, x, key=key),
    "any positional": lambda *args, key=None: noisy(*args, key=key),
    "required": lambda params, x, *, key: noisy(params, x, key=key),
    "jit": jax.jit(noisy),
    "checkpoint": jax.checkpoint(noisy),
    "kwargs": wrapped(noisy),
    "kwargs twice": wrapped(wrapped(noisy)),
    "kwargs of a partial": functools.partial(wrapped(noisy)),
    "kwargs in jit": jax.jit(wrapped(noisy)),
    "kwargs in checkpoint": jax.checkpoint(wrapped(noisy)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_take_a_key_get_it(name):
    model = js.LayeredModel([dense, LAYERS[name]], mean)
    known = js.LayeredModel([dense, noisy], mean)
    assert model.takes_key
    for key in (None, jax.random.key(3), jax.random.key(4)):
        assert_close(model(PARAMS, BATCH, rng=key), known(PARAMS, BATCH, rng=key))


WITHOUT: dict[str, Callable[..., Any]] = {
    "plain": dense,
    "bound": functools.partial(noisy, key=None),
    "bound of kwargs": functools.partial(wrapped(noisy), key=None),
    "kwargs": wrapped(dense),
    "kwargs twice": wrapped(wrapped(dense)),
    "kwargs in jit": jax.jit(wrapped(dense)),
    "kwargs in checkpoint": jax.checkpoint(wrapped(dense)),
    "kwargs around jit": wrapped(jax.jit(dense)),
    "kwargs around checkpoint": wrapped(jax.checkpoint(dense)),
    "flax": lambda params, x, **kwargs: jnp.tanh(
        nn.Dense(WIDTH, use_bias=False).apply({"params": {"kernel": params}}, x, **kwargs)
    ),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_layers_that_take_no_key_get_none(name):
    model = js.LayeredModel([dense, WITHOUT[name]], mean)
    assert model.takes_key == name.startswith(("kwargs", "flax"))
    known = js.LayeredModel([dense, dense], mean)(PARAMS, BATCH)
    for key in (None, jax.random.key(3)):
        assert_close(model(PARAMS, BATCH, rng=key), known)
        assert_close(jax.jit(model)(PARAMS, BATCH, rng=key), known)


def test_builtins_without_a_signature_get_two_arguments():
    assert js.LayeredModel([max], lambda x, _: x)([2.0], 3.0) == 3


@pytest.mark.parametrize("executor", EXECUTORS)
def test_dropout_behind_kwargs_trains_on_stages_with_its_keys(mesh_of, executor):
    rows = [PARAMS[0], *[PARAMS[1]] * 5]  # of which several are computed by one loop
    key = jax.random.key(1)
    found, _ = both(
        *(mesh_of, js.LayeredModel([dense, *[wrapped(noisy)] * 5], mean), rows, executor), rng=key
    )
    named = js.LayeredModel([dense, *[noisy] * 5], mean)
    known, _ = both(mesh_of, named, rows, executor, rng=key)
    assert_close(found, known)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_apply_of_flax_is_a_layer(mesh_of, executor):
    modules = [nn.Dense(WIDTH), nn.Dense(2)]
    x = BATCH
    params = []
    for module in modules:
        params.append(module.init(jax.random.key(0), x))
        x = module.apply(params[-1], x)
    model = js.LayeredModel([module.apply for module in modules], mean)

    def plain(params, batch):
        x = modules[0].apply(params[0], batch)
        return jnp.mean(modules[1].apply(params[1], x))

    found, _ = both(mesh_of, model, params, executor, rng=jax.random.key(0))
    assert_close(found, jax.value_and_grad(plain)(params, BATCH))


def test_kwargs_are_tried_once():
    seen = []

    def layer(params, x, **kwargs):
        seen.append(sorted(kwargs))
        return dense(params, x, **kwargs)

    model = js.LayeredModel([layer], mean)
    for _ in range(2):
        model(PARAMS[:1], BATCH)
    assert seen == [["key"], [], []]
    assert model.takes_key


def test_a_layer_that_drops_none_gets_the_key_when_there_is_one():
    def layer(params, x, **kwargs):
        return noisy(params, x, **{n: value for n, value in kwargs.items() if value is not None})

    model, known = (js.LayeredModel([one], mean) for one in (layer, noisy))
    for key in (None, jax.random.key(3)):
        assert_close(model(PARAMS[:1], BATCH, rng=key), known(PARAMS[:1], BATCH, rng=key))


def test_errors_from_deeper_inside_are_raised_as_they_are():
    def dropping(params, x, *, key=None):
        return x if key is None else dense(params, x, key=key)  # type: ignore[call-arg]

    def failing(params, x, **kwargs):
        raise TypeError("of another kind, about 'key'")

    def other(params, x, **kwargs):
        return dense(params, x, rate=1, **kwargs)  # type: ignore[call-arg]

    def run(layer):
        js.LayeredModel([layer], mean)(PARAMS[:1], BATCH, rng=jax.random.key(0))

    for layer in (dropping, wrapped(dropping)):
        with pytest.raises(TypeError, match="unexpected keyword argument 'key'"):
            run(layer)
    with pytest.raises(TypeError, match="of another kind"):
        run(failing)
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate'") as raised:
        run(other)
    assert raised.value.__context__ is None

    def always(params, x, **kwargs):
        return dense(params, x, key=None)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="unexpected keyword argument 'key'"):
        run(always)


def test_state_and_any_other_keywords():
    def counting(params, x, *, state, **kwargs):
        return noisy(params, x, **kwargs), {"count": state["count"] + 1}

    model = js.LayeredModel([counting], mean)
    states = [{"count": jnp.zeros(())}]
    loss, (_, after) = model(PARAMS[:1], BATCH, rng=jax.random.key(0), model_state=states)
    known = js.LayeredModel([noisy], mean)(PARAMS[:1], BATCH, rng=jax.random.key(0))
    assert_close((loss, after), (known, [{"count": 1.0}]))


@pytest.mark.parametrize(
    ("layer", "got"),
    [
        (lambda x: x, "<lambda> as layer 1, whose signature is (x)"),
        (lambda x, *, key=None: x, "<lambda> as layer 1, whose signature is (x, *, key=None)"),
        (lambda params, x, mask: x, "whose signature is (params, x, mask)"),
        (lambda params, x, *, train: x, "whose signature is (params, x, *, train)"),
        (lambda params, x, key, /: x, "whose signature is (params, x, key, /)"),
        (functools.partial(dense, PARAMS[0]), "partial as layer 1, whose signature is (x)"),
        (lambda: None, "whose signature is ()"),
        (nn.Dense(3), "Dense as layer 1, whose signature is (inputs)"),
        (
            eqx.nn.Linear(2, 3, key=jax.random.key(0)),
            "Linear as layer 1, whose signature is (x, *, key=None)",
        ),
        (eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)), "whose signature is (x, *, key=None)"),
    ],
)
def test_layers_that_cannot_take_two_arguments_are_refused(layer, got):
    said = "`layers` must be functions that can be called as layer(params, x), got "
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        js.LayeredModel([dense, layer], mean)
    assert got in str(raised.value)


# What a loss returns.


LOSSES: dict[str, Callable[[jax.Array], Any]] = {
    "float": lambda x: 0.5,
    "integer": lambda x: 3,
    "float of NumPy": lambda x: np.float64(0.5),
    "integer of NumPy": lambda x: np.int64(2),
    "array of integers": lambda x: jnp.int32(len(x)) // len(x),
    "bool": lambda x: True,
    "bool of NumPy": lambda x: np.bool_(True),
    "array of bool": lambda x: jnp.any(x > 0),
    "pair of integers": lambda x: (3 * len(x), 4 * len(x)),
    "pair of one of each": lambda x: (jnp.sum(x), np.int32(x.size)),
    "pair with bool": lambda x: (jnp.mean(x), True),
    "constant pair": lambda x: (np.float32(len(x)), jnp.float32(len(x))),
    "metrics": lambda x: (
        jnp.mean(x),
        {
            "float": 0.5,
            "integer": 3,
            "NumPy": np.int64(4),
            "array": jnp.sum(x > 2),
            "bool": True,
            "pair": (jnp.sum(x > 0.2), x.size),
        },
    ),
    "constant with metrics": lambda x: (1, {"a": 2, "b": (3, np.float64(4))}),
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_may_be_numbers_of_any_kind(mesh_of, name, executor):
    model = js.LayeredModel([dense, dense], lambda x, _: LOSSES[name](x))
    value = model(PARAMS, BATCH)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(value))
    found, evaluated = both(mesh_of, model, PARAMS, executor)
    expected = jax.value_and_grad(model, has_aux=isinstance(value, tuple))(PARAMS, BATCH)
    assert_close((found, evaluated), (expected, value))
    assert jax.tree.map(lambda x: x.dtype.name, found) == jax.tree.map(
        lambda x: x.dtype.name, expected
    )


def test_precision_is_kept():
    def kind(x):
        return js.LayeredModel([dense], lambda *_: x)(PARAMS[:1], BATCH).dtype

    assert kind(jnp.bfloat16(1)) == jnp.bfloat16
    with jax.enable_x64(True):
        assert (kind(np.float64(1)), kind(1.0), kind(1)) == (np.float64, np.float32, np.float32)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("value", "got"),
    [
        (None, "None"),
        ("loss", "str"),
        (np.str_("loss"), "<U4[]"),
        (np.array(None), "object[]"),
        (np.ones(1, np.float32), "float32[1]"),
        ([1.0], "['float']"),
        ((1.0, None), "('float', 'None')"),
        ((1.0, {"a": None}), "('float', {'a': 'None'})"),
        ((1.0, {"a": np.ones(1)}), "('float', {'a': 'float64[1]'})"),
        (jax.random.key(0), "key<fry>[]"),
    ],
)
def test_what_is_no_loss_is_refused(mesh_of, value, got, executor):
    model = js.LayeredModel([dense, dense], lambda *_: value)
    said = (
        "`loss` must return a scalar, (sum, weight) whose quotient it is, or one of these with a "
        f"dict of metrics that are such, got {got}."
    )
    for call in (model, jax.grad(model), lambda *_: both(mesh_of, model, PARAMS, executor)):
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            call(PARAMS, BATCH)
        assert raised.value.args == (said,)
