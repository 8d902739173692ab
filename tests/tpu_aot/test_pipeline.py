"""A pipeline as one program, compiled for a TPU slice: its memory, and what runs beside what."""

import re

import pytest

import jaxslowmo as js
from support.pipeline_programs import (
    activation_bytes,
    lowered_pipeline,
    saved_values,
    temporary_bytes,
)
from support.tpu_slices import tpu_mesh

pytestmark = pytest.mark.xdist_group("pipeline on v5e:2x2")

EXAMPLES, WIDTH = MICROBATCH = 32768, 128  # narrow ones are compiled quickly


def compiled(kind):
    """The program of a step of four microbatches per stage, of two, and the schedule."""
    mesh = tpu_mesh("v5e:2x2", {"replica": 2, "stage": 2})
    program, schedule = lowered_pipeline(mesh, kind, 2, MICROBATCH)
    return program.compile(), schedule


@pytest.fixture(scope="module")
def one_f_one_b():
    return compiled(js.schedules.one_f_one_b)


def test_memory_in_flight_is_the_stash_of_the_schedule(one_f_one_b):
    (program, few), (larger, many) = one_f_one_b, compiled(js.schedules.gpipe)
    assert (few.stash, many.stash) == ((2, 1), (8, 8))
    saved = temporary_bytes(larger) - temporary_bytes(program)
    wanted = saved_values(few, many, 2) * activation_bytes(MICROBATCH)
    assert saved == pytest.approx(wanted, rel=0.05)


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
