"""Read programs of updates: the axes of their collectives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax

import jaxslowmo as js
from jaxslowmo.tracing import read_update
from jaxslowmo.transform import takes_extra
from support.promotion import promoting

WHOLE = {"w": np.ones((2, 3), np.float32)}
MESHES = {
    "devices": js.make_mesh({"replica": 2, "device": 2}),
    "virtual": js.virtual_mesh({"replica": 2, "device": 2}),
}


def found(tx, kind):
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (2, *jnp.shape(x))), tx.init(WHOLE))
    tx = optax.with_extra_args_support(tx)
    params = jax.tree.map(lambda x: np.stack([x, x]), WHOLE)
    none = jax.tree.map(lambda _: frozenset(), params)
    how = {"mesh": MESHES[kind], "axes": ("replica", "device"), "extra": takes_extra(state)}
    facts = read_update(tx, params, state, **how, varying=none)
    return set() if facts is None else facts.undeclared


def mean_over(axis):
    return optax.stateless(lambda grads, params: lax.pmean(grads, axis))


def in_a_branch():
    def update(grads, params):
        constant = jax.tree.map(jnp.zeros_like, grads)
        varying = jnp.sum(grads["w"]) > 0
        mean = lax.cond(varying, lambda: grads, lambda: constant)
        return lax.pmean(mean, "replica")

    return optax.stateless(update)


CASES = {
    "a mean": (mean_over("replica"), {"replica"}),
    "over several": (
        optax.chain(optax.clip(1.0), mean_over(("replica", "device"))),
        {"replica", "device"},
    ),
    "where types are in the way": (in_a_branch(), {"replica"}),
    "a loss that it needs": (optax.chain(optax.polyak_sgd(), mean_over("device")), {"device"}),
    "an axis of its own": (
        optax.stateless(
            lambda grads, params: jax.vmap(
                lambda x: jax.tree.map(lambda y: y + lax.pmean(y, "run"), x), axis_name="run"
            )(grads)
        ),
        set(),
    ),
    "ours": (js.all_reduce_gradients("replica"), set()),
    "what cannot be traced": (mean_over("nowhere"), set()),
    "no more than it knows": (
        promoting(optax.contrib.sam(optax.sgd(0.1), mean_over("replica"))),
        {"replica"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_axes(name):
    tx, axes = CASES[name]
    for kind in MESHES:
        assert found(tx, kind) == axes


@pytest.mark.parametrize(
    ("part", "name"),
    [("gradients", "jax.make_jaxpr"), ("optimizer", "jax.sharding.use_abstract_mesh")],
)
def test_a_reader_that_fails_is_not_taken_for_a_transform_that_cannot_be_traced(
    monkeypatch, name, part
):
    """An upgrade of jax that breaks the reader must not switch off what it checks."""

    def moved(*args, **kwargs):
        raise AttributeError(f"no {name}")

    averages = js.chain(js.all_reduce_gradients("replica"), optax.trace(0.9))
    parts: dict[str, Any] = {"optimizer": optax.adam(0.1), "gradients": averages}
    parts[part] = optax.chain(optax.trace(0.9), mean_over("replica"))
    step = js.make_train_step(lambda p, b: jnp.sum(p["w"]), mesh=MESHES["virtual"], **parts)
    with pytest.raises(ValueError, match=f"`{part}` holds a transform with collectives"):
        step.init(WHOLE)
    monkeypatch.setattr(name, moved)
    with pytest.raises(AttributeError, match=f"no {name}"):
        step.init(WHOLE)
