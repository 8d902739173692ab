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
LARGE = 65536, 512  # of which no part fits into a memory beside the cores


def compiled(kind, stages, layers, microbatch=MICROBATCH):
    """The program of a step of four microbatches per stage, and the schedule."""
    mesh = tpu_mesh("v5e:2x2", {"replica": 4 // stages, "stage": stages})
    program, schedule = lowered_pipeline(mesh, kind, layers, microbatch)
    return program.compile(), schedule


@pytest.fixture(scope="module")
def one_f_one_b():
    return compiled(js.schedules.one_f_one_b, 2, 2)


@pytest.fixture(scope="module")
def gpipe():
    return compiled(js.schedules.gpipe, 2, 2)


def check_memory(one, other, layers, microbatch=MICROBATCH):
    (program, few), (larger, many) = one, other
    saved = temporary_bytes(larger) - temporary_bytes(program)
    wanted = saved_values(few, many, layers) * activation_bytes(microbatch)
    assert saved == pytest.approx(wanted, rel=0.05)


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
