"""What parameters of layers may hold: modules whose leaves are arrays, and nothing else."""

import functools
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.layered import assert_close

EXECUTORS = ["one_program", "host"]
WIDTH = 3
PARAMS = [jnp.full((2, WIDTH), 0.5), jnp.full((WIDTH, WIDTH), 0.3)]
BATCH = np.arange(8.0, dtype=np.float32).reshape(4, 2) / 8


def dense(params, x):
    return jnp.tanh(x @ params)


def mean(x, _):
    return jnp.mean(x)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("weight", "bias", "activate"),
    meta_fields=("width",),
)
@dataclass(frozen=True)
class Module:
    """As a module of equinox: leaves that are arrays, None or functions, and static fields."""

    weight: Any
    width: int
    bias: Any = None
    activate: Any = field(default=jnp.tanh)

    def __call__(self, x):
        y = x @ self.weight
        return self.activate(y if self.bias is None else y + self.bias)


def modules(kind):
    """Modules of two layers that take one example."""
    if kind == "stand-in":
        return [Module(PARAMS[0], WIDTH, jnp.ones(WIDTH)), Module(PARAMS[1], WIDTH)]
    one, other = jax.random.split(jax.random.key(0))
    return [
        eqx.nn.MLP(2, WIDTH, 4, 1, key=one),
        eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=other),
    ]


def of_module(static):
    return lambda params, x: jax.vmap(eqx.combine(params, static))(x)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("kind", ["stand-in", "equinox"])
def test_the_arrays_of_modules_train(mesh_of, kind, executor):
    split = [eqx.partition(module, eqx.is_array) for module in modules(kind)]
    params = [arrays for arrays, _ in split]
    model = js.LayeredModel([of_module(static) for _, static in split], mean)
    schedule = js.schedules.one_f_one_b(2, 2)
    mesh = mesh_of({"replica": 1, "stage": 2})
    pipe = js.pipelined(model, params, schedule, mesh=mesh, executor=executor)
    value, grads = jax.value_and_grad(pipe)(pipe.layout.stack(params), BATCH)
    grads = pipe.layout.unstack(grads)
    assert_close((value, grads), jax.value_and_grad(model)(params, BATCH))
    assert jax.tree.structure(grads) == jax.tree.structure(params)

    def trained(loss_fn, mesh):
        step = js.make_train_step(loss_fn, optax.adam(0.01, eps=1e-2), sync="none", mesh=mesh)
        return step(step.init(params), BATCH)[0].params

    whole = trained(model, js.virtual_mesh({"replica": 1}))
    assert_close(pipe.layout.unstack_like(trained(pipe, mesh)), whole)


@pytest.mark.parametrize(
    ("leaf", "got"),
    [
        (jnp.tanh, "at '1/activate'"),
        ("tanh", "got str at '1/activate'"),
        (np.array([None]), "got object[1] at '1/activate'"),
        (np.array(["a"]), "got <U1[1] at '1/activate'"),
        (object(), "got object at '1/activate'"),
    ],
)
def test_leaves_that_are_no_arrays_are_named(mesh_of, leaf, got):
    def refused(call):
        with pytest.raises(ValueError, match="`params` must hold arrays alone, got ") as raised:
            call()
        assert got in str(raised.value)
        assert "`eqx.filter(module, eqx.is_array)`" in str(raised.value)

    params = [PARAMS[0], Module(PARAMS[1], WIDTH, activate=leaf)]
    model = js.LayeredModel([dense, lambda params, x: dense(params.weight, x)], mean)
    mesh = mesh_of({"replica": 1, "stage": 2})
    schedule = js.schedules.gpipe(2, 2)
    for parts in (None, js.partition_uniform(2, 2)):
        refused(lambda parts=parts: js.pipelined(model, params, schedule, parts=parts, mesh=mesh))
    arrays = [PARAMS[0], Module(PARAMS[1], WIDTH, activate=None)]
    pipe = js.pipelined(model, arrays, schedule, mesh=mesh)
    refused(lambda: pipe.layout.stack(params))
    tied = js.LayeredModel(model.layers, mean, tied=[((0, "(root)"), (1, "weight"))])
    refused(lambda: js.pipelined(tied, params, schedule, mesh=mesh))


def test_whole_modules_in_the_place_of_lists_are_refused(mesh_of):
    mesh, schedule = mesh_of({"stage": 2}), js.schedules.gpipe(2, 2)
    module = modules("equinox")[0]
    with pytest.raises(ValueError, match=r"`model` must be a js.LayeredModel, .*, got MLP\.$"):
        js.pipelined(module, PARAMS, schedule, mesh=mesh)  # type: ignore[arg-type]
    model = js.LayeredModel([dense, dense], mean)
    with pytest.raises(ValueError, match=r"`params` must be a sequence of one tree .*, got MLP\.$"):
        js.pipelined(model, module, schedule, mesh=mesh)  # type: ignore[arg-type]


def test_keys_and_other_leaves_of_parameters_and_state_are_named(mesh_of):
    mesh, schedule = mesh_of({"stage": 2}), js.schedules.gpipe(2, 2)
    model = js.LayeredModel([dense, dense], mean)
    pipe = js.pipelined(model, PARAMS, schedule, mesh=mesh)
    keys = [PARAMS[0], jax.random.split(jax.random.key(0), 9).reshape(WIDTH, WIDTH)]
    for call in (pipe.layout.stack, lambda x: js.pipelined(model, x, schedule, mesh=mesh)):
        with pytest.raises(ValueError, match="`params` must hold numbers, got '1' of type key<"):
            call(keys)
    carrying = js.LayeredModel([dense, lambda params, x, *, state: (x, state)], mean)
    states = [{}, {"fn": jnp.tanh}]
    with pytest.raises(ValueError, match=r"^`model_state` must hold arrays alone, .* at '1/fn':"):
        js.pipelined(carrying, PARAMS, schedule, mesh=mesh, model_state=states)


def test_the_whole_model_takes_modules_with_functions():
    params = modules("stand-in")
    model = js.LayeredModel([lambda module, x: module(x)] * 2, mean)
    arrays, static = eqx.partition(params, eqx.is_array)
    grads = jax.grad(lambda a: model(eqx.combine(a, static), BATCH))(arrays)
    assert_close(eqx.filter_grad(model)(params, BATCH), grads)
