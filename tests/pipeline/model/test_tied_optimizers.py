"""A tied parameter is one to the optimizer, in stages and without, whatever its copies are called.

By hand the second copy does not exist.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

VOCABULARY, WIDTH, UPDATES = 8, 4, 3
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
WEIGHT = RNG.normal(size=(2, WIDTH, WIDTH)).astype(np.float32) / 2
PARAMS = [{"embed": TABLE}, {"w": WEIGHT[0]}, {"w": WEIGHT[1]}, {"lm_head": TABLE}]
IDS = RNG.integers(0, VOCABULARY, (UPDATES, 2, 8, 5))


def looked_up(params, batch):
    return params["embed"][batch[:, 0]]


def mixed(params, x):
    return jnp.tanh(x @ params["w"])


def scored(params, x):
    return x @ params["lm_head"].T


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1]).mean()


TIE = [((0, "embed"), (3, "lm_head"))]
MODEL = js.LayeredModel([looked_up, mixed, mixed, scored], cross_entropy, tied=TIE)


def named(name, params):
    """Whether the name is in the path of each leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: name in jax.tree_util.keystr(path), params
    )


# It differs between the names of the copies.
OPTIMIZER = optax.adamw(0.05, weight_decay=0.3, mask=functools.partial(named, "lm_head"))


@functools.cache
def by_hand():
    def loss(params, batch):
        x = mixed(params[2], mixed(params[1], looked_up(params[0], batch)))
        return cross_entropy(x @ params[0]["embed"].T, batch)

    params = [*PARAMS[:3], {}]

    @jax.jit
    def update(params, state, batch):
        updates, state = OPTIMIZER.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = OPTIMIZER.init(params)
    for batch in batches():
        params, state = update(params, state, batch)
    return [*params[:3], {"lm_head": params[0]["embed"]}]


def batches():
    return np.moveaxis(IDS, 1, 2)


def trained(loss, mesh):
    step = js.make_train_step(loss, OPTIMIZER, mesh=mesh, sync="none")
    state = step.init(PARAMS)
    for batch in batches():
        state, _ = step(state, batch)
    return state.params


def close(found):
    for layer, wanted in zip(found, by_hand(), strict=True):
        for leaf, x in wanted.items():
            np.testing.assert_allclose(layer[leaf], x, rtol=1e-5, atol=1e-6, err_msg=leaf)


def test_without_stages():
    params = trained(MODEL, js.virtual_mesh({"replica": 1}))
    close(jax.tree.map(lambda x: x[0], params))


@pytest.mark.parametrize(("schedule", "executor"), [("zbv", "host"), ("gpipe", "one_program")])
def test_in_stages(schedule, executor):
    """Compare each copy; they lie on two devices, or both on one (zbv)."""
    mesh = js.make_mesh({"replica": 1, "stage": 2})
    schedule = getattr(js.schedules, schedule)(2, 2)
    pipe = js.pipelined(MODEL, PARAMS, schedule, mesh=mesh, executor=executor)
    buffers = {n: np.asarray(x[0]) for n, x in trained(pipe, mesh).items()}
    found = [{} for _ in PARAMS]
    for stage in range(2):
        tree = pipe.layout.packing.unpack({n: x[stage] for n, x in buffers.items()}, stage)
        for layer, leaves in zip(found, tree, strict=True):
            layer |= {n: x for n, x in leaves.items() if not isinstance(x, optax.MaskedNode)}
    close(found)
