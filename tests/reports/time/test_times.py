"""How long a step spent on what, from the operations that devices ran."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxslowmo.reports._step_times import (
    DeviceOp,
    StepProgram,
    length,
    overlap,
    step_times,
)
from support.compiled_step import TEXT


def times(*ops, step_time=1.0):
    """Return mean times of operations (device, name, start, end) in seconds."""
    spans = [DeviceOp(d, int(1e9 * a), int(1e9 * b), n) for d, n, a, b in ops]
    return step_times(spans, StepProgram(TEXT), step_time)


def test_overlap_on_one_device():
    found = times(
        ("0", "fusion.1", 0, 2),
        ("0", "ar-start", 2, 2.1),
        ("0", "fusion.2", 2.5, 4),
        ("0", "adam", 4.5, 5),
        ("0", "ar-done", 5, 6),
        ("0", "cond.1", 0, 9),  # its contents count, not itself
        ("0", "copy.1", 7, 8),
        step_time=10,
    )
    assert found.step_time == 10
    assert (found.forward_compute_time, found.backward_compute_time) == (2, 1.5)
    assert found.other_compute_time == 1.5
    assert found.communication_time == pytest.approx(4)  # from 2 to 6: start to done
    assert found.overlap_time == pytest.approx(2)
    assert found.backward_overlap_time == pytest.approx(1.5)
    assert found.exposed_communication_time == pytest.approx(2)
    assert found.communication == {"gradients": pytest.approx(4)}


def test_other_devices_hide_nothing_and_means_are_over_devices():
    found = times(
        ("0", "slow.1", 0, 2),
        ("0", "statistics", 1, 3),
        ("1", "fusion.1", 0, 4),
        ("1", "slow.1", 4, 6),
    )
    assert found.overlap_time == 0
    assert found.communication_time == pytest.approx((3 + 2) / 2)  # a union on device 0
    assert found.communication == {"slow": 2, "model_state": 1}
    assert found.forward_compute_time == 2


def test_every_wait_belongs_to_the_last_start_before_it():
    pair = (("ar-start", 0), ("ar-done", 3))
    found = times(
        *[("0", name, t + at, t + at + 0.5) for t in (0, 10) for name, at in pair],
        ("0", "fusion.1", 4, 9),
    )
    assert found.communication_time == pytest.approx(2 * 3.5)
    assert found.overlap_time == 0


def test_names_that_no_instruction_has():
    found = times(("0", "ncclDevKernel_AllReduce_Sum_f32", 0, 1), ("0", "memset", 1, 3))
    assert found.communication == {"other": 1}
    assert found.other_compute_time == 2


INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)))


def instants(intervals):
    return {t for start, end in intervals for t in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_intervals_hold_the_same_instants_as_sets_do(first, second):
    assert length(first) == len(instants(first))
    assert overlap(first, second) == len(instants(first) & instants(second))
