"""Layers as large models have them: parameters in parts, a nested `shard_map`, constraints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.layered import assert_close

WIDTH, HIDDEN, EXAMPLES = 8, 16, 16
DRAW = np.random.default_rng(0).normal


def matrix(*shape):
    return np.float32(DRAW(size=shape) / 3)


def feed_forward():
    return {"up": matrix(WIDTH, HIDDEN), "down": matrix(HIDDEN, WIDTH)}


PARAMS = [{"w": matrix(WIDTH, WIDTH)}, feed_forward(), feed_forward(), {"w": matrix(WIDTH, 2)}]


def has(*names):
    return set(names) <= {*jax.sharding.get_abstract_mesh().axis_names}


def over_fsdp(x):
    return jax.lax.with_sharding_constraint(x, P("fsdp")) if has("fsdp") else x


def embedded(params, batch):
    return over_fsdp(jnp.tanh(batch["x"] @ params["w"]))


def block(params, x):
    """Add what each device computes with its part of the hidden units."""

    def part(up, down, x):
        return jax.lax.psum(jnp.tanh(x @ up) @ down, "tensor")

    if not has("tensor"):
        return over_fsdp(x + jnp.tanh(x @ params["up"]) @ params["down"])
    specs = P(None, "tensor"), P("tensor"), P()
    fn = jax.shard_map(part, in_specs=specs, out_specs=P(), axis_names={"tensor"}, check_vma=False)
    return over_fsdp(x + fn(params["up"], params["down"], x))


def error(y, batch):
    return jnp.mean((y - batch["y"]) ** 2)


MODEL = js.LayeredModel([embedded, block, block, lambda p, x: x @ p["w"]], error)


def pipeline(mesh, schedule, executor):
    fsdp, tensor = (name if name in mesh.shape else None for name in ("fsdp", "tensor"))
    of_block = {"up": P(fsdp, tensor), "down": P(tensor, fsdp)}
    specs = [{"w": P(fsdp)}, of_block, of_block, {"w": P(fsdp)}]
    options = {"mesh": mesh, "executor": executor, "param_specs": specs}
    return js.pipelined(MODEL, PARAMS, getattr(js.schedules, schedule)(2, 4), **options)


def trained(loss_fn, mesh):
    several = mesh.shape["replica"] > 1
    sync = js.local_sgd("replica", sync_every=2) if several else "none"
    step = js.make_train_step(loss_fn, optax.adamw(0.01), mesh=mesh, sync=sync)
    state, metrics = step.init(PARAMS), None
    for i in range(3):
        draw = np.random.default_rng(i).normal
        batch = {"x": draw(size=(EXAMPLES, WIDTH)), "y": draw(size=(EXAMPLES, 2))}
        state, metrics = step(state, jax.tree.map(np.float32, batch))
    return step.consensus(state), metrics


@functools.cache
def without_stages(replicas):
    return trained(MODEL, js.virtual_mesh({"replica": replicas}))


@pytest.mark.parametrize(
    ("inner", "executor", "schedule"),
    [
        (("tensor",), "one_program", "zbv"),
        (("fsdp",), "one_program", "one_f_one_b"),
        (("fsdp", "tensor"), "host", "zbv"),
    ],
)
def test_they_train_as_without_stages(mesh_of, inner, executor, schedule):
    mesh = mesh_of({"replica": 8 // 2 ** (1 + len(inner)), "stage": 2, **dict.fromkeys(inner, 2)})
    pipe = pipeline(mesh, schedule, executor)
    assert_close(trained(pipe, mesh), without_stages(mesh.shape["replica"]))


def test_what_would_not_end_is_refused_again(mesh_of):
    """In one program the compiler would permute activations among the devices of all stages."""
    mesh = mesh_of({"replica": 1, "stage": 2, "fsdp": 2, "tensor": 2})
    pipe = pipeline(mesh, "gpipe", "one_program")
    step = js.make_train_step(pipe, optax.sgd(0.1), mesh=mesh, sync="none")
    state = step.init(PARAMS)
    batch = {"x": np.ones((4, WIDTH), np.float32), "y": np.ones((4, 2), np.float32)}
    for run in (step, step, step.evaluate):
        with pytest.raises(ValueError, match=r"for '.*' of a layer .*`executor`=\"host\""):
            run(state, batch)
