"""A small model, and its training steps of one replica as other libraries write them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

REPLICAS, WIDTH, HIDDEN = 4, 6, 16  # a bias that 4 replicas do not divide
RANDOM = np.random.default_rng(0)
BATCHES = RANDOM.normal(size=(7, 2 * REPLICAS, WIDTH)).astype(np.float32)
PARAMS = {
    "bias": np.zeros(WIDTH, np.float32),
    "in": 0.3 * RANDOM.normal(size=(WIDTH, HIDDEN)).astype(np.float32),
    "out": 0.3 * RANDOM.normal(size=(HIDDEN, WIDTH)).astype(np.float32),
}
SPECS = {"bias": P(), "in": P(None, "fsdp"), "out": P("fsdp")}
ADAM = optax.adam(0.02, eps=1e-4)


def loss_fn(params, batch, hidden=jnp.tanh):
    found = hidden(batch @ params["in"]) @ params["out"] + params["bias"][None]
    return jnp.mean((found - batch) ** 2)


def placed(mesh):
    """Return the parameters, sharded if the mesh has an axis for it."""
    if "fsdp" not in mesh.shape:
        return PARAMS
    return {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in PARAMS.items()}


def assert_close(tree, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-6, atol=3e-6),
        *jax.device_get((tree, expected)),
    )


def stepped(state, batch, reduce_gradients=lambda grads: grads, optimizer=ADAM):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt_state = optimizer.update(reduce_gradients(grads), state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return state | {"params": params, "opt": opt_state, "n": state["n"] + 1}, {"loss": loss}


def start(params, optimizer=ADAM):
    return {"params": params, "opt": optimizer.init(params), "n": 0}


PARTS = {
    "get_params": lambda state: state["params"],
    "set_params": lambda state, params: state | {"params": params},
}
MOMENTS = {
    "get_opt_state": lambda state: state["opt"],
    "set_opt_state": lambda state, opt_state: state | {"opt": opt_state},
}


def plain(params):
    return stepped, start(params), PARTS, lambda params: params


class Model(nnx.Module):
    def __init__(self, params):
        for name, value in params.items():
            setattr(self, name, nnx.Param(jnp.asarray(value)))


def of_nnx(params):
    model = Model(params)
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    graphdef, variables, rest = nnx.split((model, optimizer), nnx.Param, ...)

    def train_step(state, batch):
        model, optimizer = nnx.merge(graphdef, *state, copy=True)

        def loss_of(model):
            return loss_fn({name: getattr(model, name)[...] for name in PARAMS}, batch)

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return nnx.split((model, optimizer), nnx.Param, ...)[1:], {"loss": loss}

    parts = {
        "get_params": lambda state: state[0],
        "set_params": lambda state, variables: (variables, state[1]),
    }
    return train_step, (variables, rest), parts, lambda params: nnx.to_pure_dict(params)[0]


FORMS = {"plain": plain, "nnx": of_nnx}
