"""A pipeline as one program, compiled for a TPU slice: its memory, and what runs beside what."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.tpu_slices import tpu_mesh

pytestmark = pytest.mark.xdist_group("pipeline on v5e:2x2")

EXAMPLES, WIDTH = MICROBATCH = 32768, 128  # narrow ones are compiled quickly
LARGE = 65536, 512  # of which no part fits into a memory beside the cores


def layer(params, x):
    x = x if isinstance(x, jax.Array) else x["x"]
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def loss(output, batch):
    return jnp.mean(output * batch["x"])


def compiled(kind, stages, layers, microbatch=MICROBATCH):
    """The program of a step of four microbatches per stage, and the schedule."""
    examples, width = microbatch
    mesh = tpu_mesh("v5e:2x2", {"replica": 4 // stages, "stage": stages})
    schedule = kind(stages, 4 * stages)
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    params = [{"up": leaf(width, width), "down": leaf(width, width)}] * layers
    pipe = js.pipelined(js.LayeredModel([layer] * layers, loss), params, schedule, mesh=mesh)
    shape = 4 * stages * examples, width
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    step = jax.jit(jax.value_and_grad(pipe.loss_fn))
    return step.lower(pipe.layout.stack(params), {"x": x}).compile(), schedule


def temporary_bytes(program):
    return program.memory_analysis().temp_size_in_bytes


@pytest.fixture(scope="module")
def one_f_one_b():
    return compiled(js.schedules.one_f_one_b, 2, 2)


@pytest.fixture(scope="module")
def gpipe():
    return compiled(js.schedules.gpipe, 2, 2)


def saved_values(few, many, layers):
    """Activations that fewer rows save: per layer its input, the tanh and its derivative.

    The first stage reads its input from the batch; the row of that value is as long as those of
    the second stage.
    """
    per_stage = 3 * layers // few.num_stages
    in_few = (per_stage - 1) * few.stash[0] + few.stash[1]
    return per_stage * max(many.stash) - in_few


def check_memory(one, other, layers, microbatch=MICROBATCH):
    (program, few), (larger, many) = one, other
    saved = temporary_bytes(larger) - temporary_bytes(program)
    activation = 2 * math.prod(microbatch)  # bytes, bfloat16
    assert saved == pytest.approx(saved_values(few, many, layers) * activation, rel=0.05)


def test_memory_in_flight_is_the_stash_of_the_schedule(one_f_one_b, gpipe):
    assert (one_f_one_b[1].stash, gpipe[1].stash) == ((2, 1), (8, 8))
    check_memory(one_f_one_b, gpipe, 2)


def loop_of_ticks(program):
    """Instructions of the loop's body in the order in which they run, but for those of no cost."""
    text = program.as_text()
    assert "is_scheduled=true" in text.partition("\n")[0]
    bodies = [part for part in text.split("\n\n") if "collective-permute-start(" in part]
    (body,) = bodies
    return [line.strip() for line in body.splitlines()]


def test_what_is_sent_travels_beside_products(one_f_one_b):
    lines = loop_of_ticks(one_f_one_b[0])
    place = {
        name: [i for i, line in enumerate(lines) if re.search(pattern, line)]
        for name, pattern in {
            "start": r" collective-permute-start\(",
            "done": r" collective-permute-done\(",
            "F": r" conditional\(.*/F/cond",
            "B": r" conditional\(.*/B/cond",
        }.items()
    }
    (cotangents, activations), (came, went) = place["start"], place["done"]
    (f,), (b,) = place["F"], place["B"]
    # Cotangents of the tick before travel beside F, activations of this one beside B.
    assert cotangents < f < came < b
    assert f < activations < b < went


def test_buffers_are_written_where_they_stand(one_f_one_b):
    lines = "\n".join(loop_of_ticks(one_f_one_b[0]))
    assert re.search(rf"bf16\[2,{EXAMPLES},{WIDTH}\]", lines)
    assert not re.search(rf"bf16\[2,{EXAMPLES},{WIDTH}\]\S* copy\(", one_f_one_b[0].as_text())


@pytest.mark.exhaustive
def test_memory_of_four_stages_of_four_layers():
    schedules = js.schedules
    kinds = schedules.one_f_one_b, schedules.gpipe
    one, other = (compiled(kind, 4, 16, LARGE) for kind in kinds)
    check_memory(one, other, 16, LARGE)
    # As 4 to 16 but for what does not depend on the schedule.
    assert temporary_bytes(one[0]) / temporary_bytes(other[0]) == pytest.approx(0.25, rel=0.15)
