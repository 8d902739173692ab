"""How long a step spent on what, from the operations that devices ran."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.profiler import ProfileData

from jaxslowmo.reports._step_times import (
    DeviceOp,
    StepProgram,
    Work,
    device_ops,
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


INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)))


def instants(intervals):
    return {t for start, end in intervals for t in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_intervals_hold_the_same_instants_as_sets_do(first, second):
    assert length(first) == len(instants(first))
    assert overlap(first, second) == len(instants(first) & instants(second))


def test_instructions_are_told_apart():
    program = StepProgram(TEXT)
    assert program.name == "jit_f"
    for name, expected in {
        "fusion.1": Work("forward"),
        "fusion.2": Work("backward"),  # by what it holds
        "copy.1": Work("other"),
        "adam": Work("other"),
        "ar-start": Work("", "gradients"),
        "ar-done": Work("", "gradients", "ar-start"),
        "spread.1": Work("backward", "gradients"),
        "cond.1": Work(),
        "slow.1": Work("", "slow"),
        "inserted": Work("", "slow"),
        "pp-start": Work("", "round 0"),
        "pp-done": Work("", "round 0", "pp-start"),
        "statistics": Work("", "model_state"),
        "tensor": Work("", "backward"),
        "to_host": Work("other"),
    }.items():
        assert program.work(name) == expected, name
    assert program.work("call.1") == Work("forward")
    assert StepProgram(TEXT).work("call.1", {"in_call"}) == Work()
    assert program.work("elsewhere") is None


# Traces of accelerators, written by hand


def plane(name, lines):
    """A plane as a text proto: lines of (event name, start, end in ns, stats by name)."""
    events = {event for _, of_line in lines for event, *_ in of_line}
    ids = {text: i for i, text in enumerate(sorted(events | set(STATS)), 1)}
    parts = [f'name: "{name}"']
    for line, of_line in lines:
        shown = []
        for event, start, end, stats in of_line:
            values = [
                f"stats {{ metadata_id: {ids[stat]} "
                + (f"int64_value: {x}" if isinstance(x, int) else f'str_value: "{x}"')
                + " }"
                for stat, x in stats.items()
            ]
            shown.append(
                f"events {{ metadata_id: {ids[event]} offset_ps: {1000 * start} "
                f"duration_ps: {1000 * (end - start)} {' '.join(values)} }}"
            )
        parts.append(f'lines {{ name: "{line}" {" ".join(shown)} }}')
    for text, i in ids.items():
        kind = "stat_metadata" if text in STATS else "event_metadata"
        parts.append(f'{kind} {{ key: {i} value {{ id: {i} name: "{text}" }} }}')
    return f"planes {{ {' '.join(parts)} }}"


STATS = ("hlo_op", "hlo_module", "device_ordinal", "_p", "_c")


def of(op, module="jit_f", **more):
    return {"hlo_op": op, "hlo_module": module, **more}


def read(*planes):
    text = " ".join(planes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jaxlib's own, under Python 3.12
        space = ProfileData.text_proto_to_serialized_xspace(text)
        found = list(device_ops(ProfileData.from_serialized_xspace(space), "jit_f"))
    return {(op.device, op.name, op.start, op.end) for op in found}


def test_traces_of_tpus_name_whole_instructions():
    ops = [
        ("%fusion.1 = f32[4]{0} fusion(f32[4]{0} %p), kind=kLoop", 0, 20, {}),
        ("%ar-done = f32[4]{0} all-reduce-done(%ar-start)", 20, 30, {}),
    ]
    asynchronous = [("%ar-start = f32[4]{0} all-reduce-start(%p)", 5, 28, {})]
    modules = ("XLA Modules", [("jit_f(123)", 0, 40, {})])
    tpu = plane("/device:TPU:1", [modules, ("XLA Ops", ops), ("Async XLA Ops", asynchronous)])
    assert read(tpu, plane("/device:TPU:1 SparseCore 0", [("XLA Ops", ops)])) == {
        ("/device:TPU:1", "fusion.1", 0, 20),
        ("/device:TPU:1", "ar-done", 20, 30),
        ("/device:TPU:1", "ar-start", 5, 28),
    }


def test_traces_of_gpus_have_streams_of_kernels():
    gpu = plane(
        "/device:GPU:0",
        [
            ("Stream #14(Compute)", [("loop_add_fusion", 0, 20, of("fusion.1"))]),
            ("Stream #20(Compute)", [("ncclDevKernel_AllReduce", 10, 28, of("ar-start"))]),
            ("Stream #21(MemcpyH2D)", [("MemcpyH2D", 0, 5, {})]),
            ("Stream #22(Compute)", [("of_another", 0, 9, of("fusion.2", "jit_g"))]),
            ("XLA Modules", [("jit_f", 0, 40, of("jit_f"))]),
        ],
    )
    assert read(gpu) == {
        ("/device:GPU:0", "fusion.1", 0, 20),
        ("/device:GPU:0", "ar-start", 10, 28),
        ("/device:GPU:0", "MemcpyH2D", 0, 5),
    }
