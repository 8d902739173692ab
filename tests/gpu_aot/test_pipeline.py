"""A pipeline as one program, compiled for GPUs: its memory, and what runs beside what."""

from collections import Counter

import jax
import pytest

from support.gpu_programs import MICROBATCH, SCHEDULES, STAGES, each_of, program
from support.gpu_schedule import read_loops
from support.pipeline_programs import activation_bytes, saved_values
from support.schedule_text import instructions, scheduled_module

both = each_of("pipeline 1F1B", "pipeline GPipe")


@both
def test_what_is_sent_travels_beside_products(name):
    """Both permutes of a tick, of an activation each, span the conditional of one half."""
    facts = program(name).facts
    (ticks,) = read_loops(facts.text)
    cotangents, activations = ticks.transfers
    for permute in (cotangents, activations):
        assert permute.collective == "collective-permute"
        assert permute.beside.count("conditional") == 1
    # One after the other, so these are different conditionals: F's, then B's.
    assert cotangents.done < activations.start
    assert ticks.in_branches == 0
    (row,) = (r for r in facts.rows if r.collective == "collective-permute")
    assert (row.axis, row.dtypes) == ("stage", ("bfloat16",))
    assert row.bytes == row.count * activation_bytes(MICROBATCH)


@both
def test_nothing_of_the_stash_is_copied(name):
    """Branches return a row, written after them: compilers for GPUs copy what branches return.

    With jax 0.10.2 they copy the sums of a stage's gradients, once before the branches and once in
    each of them, with jax 0.12 by no kernel of its own. If this fails, mend `docs/gpu.md`.
    """
    schedule = SCHEDULES[name.removeprefix("pipeline ")](STAGES, 4 * STAGES)
    rows, (examples, width) = max(schedule.stash), MICROBATCH
    module = scheduled_module(program(name).facts.text)
    copied = Counter(
        op.type.partition("{")[0]
        for computation in module.computations
        if not computation.startswith("fused")  # a kernel of its own
        for op in instructions(module, computation)
        if op.opcode == "copy"
    )
    assert f"bf16[{rows},{examples},{width}]" not in copied
    of_sums = 0 if jax.__version_info__ >= (0, 12) else 1 + 4
    assert copied[f"f32[{2 * width * width}]"] == of_sums


@pytest.mark.xdist_group("programs: pipelines")
def test_memory_in_flight_is_the_stash_of_the_schedule():
    few, many = (kind(STAGES, 4 * STAGES) for kind in SCHEDULES.values())
    assert (few.stash, many.stash) == ((4, 3, 2, 1), (16, 16, 16, 16))
    one, other = (program(f"pipeline {name}").facts.temporary_bytes for name in SCHEDULES)
    wanted = saved_values(few, many, STAGES) * activation_bytes(MICROBATCH)
    assert other - one == pytest.approx(wanted, rel=0.05)
