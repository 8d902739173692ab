"""A pipeline as one program, to be compiled for described devices, and its memory."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

Schedule = Any  # of `js.schedules`


def layer(params: Any, x: Any) -> jax.Array:
    x = x if isinstance(x, jax.Array) else x["x"]
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def loss(output: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean(output * batch["x"])


def lowered_pipeline(
    mesh: Mesh, kind: Callable[[int, int], Schedule], layers: int, microbatch: tuple[int, int]
) -> tuple[jax.stages.Lowered, Schedule]:
    """Return the program of loss and gradients of four microbatches per stage, and its schedule.

    Args:
      mesh: a mesh of described devices with an axis "stage".
      kind: returns the schedule of (stages, microbatches).
      layers: number of layers, of two square matrices of bfloat16 each.
      microbatch: examples of a microbatch, and the width of the model.
    """
    examples, width = microbatch
    stages = mesh.shape["stage"]
    schedule = kind(stages, 4 * stages)
    leaf = jax.ShapeDtypeStruct((width, width), jnp.bfloat16)
    params = [{"up": leaf, "down": leaf}] * layers
    pipe = js.pipelined(js.LayeredModel([layer] * layers, loss), params, schedule, mesh=mesh)
    shape = 4 * stages * examples, width
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    step = jax.jit(jax.value_and_grad(pipe))
    return step.lower(pipe.layout.stack(params), {"x": x}), schedule


def activation_bytes(microbatch: tuple[int, int]) -> int:
    return 2 * math.prod(microbatch)


def saved_values(few: Schedule, many: Schedule, layers: int) -> int:
    """Return how many activations fewer `few` saves: per layer its input, the tanh, its derivative.

    The first stage reads its input from the batch; the row of that value is as long as those of
    the second stage.
    """
    per_stage = 3 * layers // few.num_stages
    in_few = (per_stage - 1) * few.stash[0] + few.stash[1]
    return per_stage * max(many.stash) - in_few


def temporary_bytes(program: jax.stages.Compiled) -> int:
    memory = program.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes
