"""What becomes of traces: synthetic programs and the operations that devices ran."""

import itertools
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.profiler import ProfileData

from jaxslowmo.statistics._step_program import StepProgram, Work
from jaxslowmo.statistics._times import (
    DeviceOp,
    intersection,
    length,
    mean_times,
    step_times,
    union,
)
from jaxslowmo.statistics._trace import device_ops


def line(name, opcode, operands="", scope="", **attributes):
    parts = [f"{key}={value}" for key, value in attributes.items()]
    if scope:
        parts.append(f'metadata={{op_name="jit(f)/shard_map/{scope}" stack_frame_id=3}}')
    return f"  %{name} = f32[4]{{0}} {opcode}({operands}){''.join(', ' + p for p in parts)}"


TEXT = "\n".join(
    [
        "HloModule jit_f, is_scheduled=true, num_partitions=4",
        "",
        "%fused (p: f32[4]) -> f32[4] {",
        line("inner.1", "multiply", "%p, %p", "transpose(jvp(layer))/mul"),
        line("inner.2", "add", "%inner.1, %p", "transpose(jvp(layer))/mul"),
        line("inner.3", "add", "%inner.1, %p", "jvp(layer)/mul"),
        "}",
        "",
        "%spread (p: f32[4]) -> f32[4] {",
        line("part", "all-reduce", "%p", "all_reduce_gradients/bucket_0/psum"),
        line("product", "convolution", "%p, %p", "transpose(jvp())/dot_general"),
        "}",
        "",
        "%branch (p: f32[4]) -> f32[4] {",
        line("slow.1", "reduce-scatter", "%p", "cond/phase:slow/reduce_scatter"),
        line("inserted", "all-gather", "%slow.1"),
        "}",
        "",
        "%callee (p: f32[4]) -> f32[4] {",
        line("in_call", "add", "%p, %p", "jvp()/add"),
        "}",
        "",
        "%wrapped (p: f32[4]) -> f32[4] {",
        line("inner_permute", "collective-permute", "%p", "phase:round 0/ppermute"),
        "}",
        "",
        "ENTRY %main (p: f32[4]) -> f32[4] {",
        line("fusion.1", "fusion", "%p", "jvp(layer)/tanh", kind="kLoop", calls="%inner"),
        line("fusion.2", "fusion", "%p", kind="kLoop", calls="%fused"),
        line("copy.1", "copy", "%p"),
        line("adam", "fusion", "%p", "optimizer/mul", kind="kLoop", calls="%nothing"),
        line("ar-start", "all-reduce-start", "%p", "all_reduce_gradients/bucket_1/psum"),
        line("ar-done", "all-reduce-done", "%ar-start"),
        line("spread.1", "fusion", "%p", "transpose(jvp())/dot_general", calls="%spread"),
        line("cond.1", "conditional", "%p", branch_computations="{%branch}"),
        line("call.1", "call", "%p", to_apply="%callee"),
        line("pp-start", "async-start", "%p", calls="%wrapped"),
        line("pp-done", "async-done", "%pp-start"),
        line("statistics", "all-reduce", "%p", "phase:*/psum"),
        line("tensor", "all-gather", "%p", "transpose(jvp())/dot_general"),
        line("to_host", "send", "%p", is_host_transfer="true"),
        "}",
    ]
)


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


def times(*ops, step_time=1.0):
    """Of operations (device, name, start, end) in seconds."""
    spans = [DeviceOp(d, n, int(1e9 * a), int(1e9 * b)) for d, n, a, b in ops]
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
    found = times(
        *[("0", name, t + at, t + at + 0.5) for t in (0, 10) for name, at in PAIR],
        ("0", "fusion.1", 4, 9),
    )
    assert found.communication_time == pytest.approx(2 * 3.5)
    assert found.overlap_time == 0


PAIR = (("ar-start", 0), ("ar-done", 3))


def test_names_that_no_instruction_has():
    found = times(("0", "ncclDevKernel_AllReduce_Sum_f32", 0, 1), ("0", "memset", 1, 3))
    assert found.communication == {"other": 1}
    assert found.other_compute_time == 2
    unrelated = DeviceOp("0", "memset", 0, 10**9, is_ours=False)
    assert step_times([unrelated], StepProgram(TEXT), 1.0).other_compute_time == 0


def test_means_over_steps():
    average = mean_times([times(("0", "slow.1", 0, 2)), times(("0", "ar-start", 0, 1))])
    assert average.communication == {"slow": 1, "gradients": 0.5}
    assert average.communication_time == 1.5


def plane(name, lines, with_stats):
    """A plane as a text proto: lines of (event name, start, end in ns, hlo_op or None)."""
    names = {e[0]: i for i, e in enumerate([e for _, es in lines for e in es], 1)}
    parts = [f'name: "{name}"']
    for line_name, events in lines:
        shown = []
        for event, start, end, op in events:
            stats = f'stats {{ metadata_id: 1 str_value: "{op}" }}' if op else ""
            module = 'stats { metadata_id: 2 str_value: "jit_f" }' if with_stats and op else ""
            shown.append(
                f"events {{ metadata_id: {names[event]} offset_ps: {1000 * start} "
                f"duration_ps: {1000 * (end - start)} {stats} {module} }}"
            )
        parts.append(f'lines {{ name: "{line_name}" {" ".join(shown)} }}')
    for event, i in names.items():
        parts.append(f'event_metadata {{ key: {i} value {{ id: {i} name: "{event}" }} }}')
    for i, stat in enumerate(("hlo_op", "hlo_module"), 1):
        parts.append(f'stat_metadata {{ key: {i} value {{ id: {i} name: "{stat}" }} }}')
    return f"planes {{ {' '.join(parts)} }}"


def read(*planes):
    text = " ".join(planes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jaxlib's own, under Python 3.12
        space = ProfileData.text_proto_to_serialized_xspace(text)
        found = list(device_ops(ProfileData.from_serialized_xspace(space), "jit_f"))
    return {(op.device, op.name, op.start, op.end) for op in found}


def test_traces_of_tpus_name_whole_instructions():
    ops = [
        ("%fusion.1 = f32[4]{0} fusion(f32[4]{0} %p), kind=kLoop", 0, 20, None),
        ("%ar-done = f32[4]{0} all-reduce-done(%ar-start)", 20, 30, None),
    ]
    asynchronous = [("%ar-start = f32[4]{0} all-reduce-start(%p)", 5, 28, None)]
    tpu = plane(
        "/device:TPU:1",
        [
            ("XLA Modules", [("jit_f(123)", 0, 40, None)]),
            ("XLA Ops", ops),
            ("Async XLA Ops", asynchronous),
        ],
        with_stats=False,
    )
    helper = plane("/device:TPU:1 SparseCore 0", [("XLA Ops", ops)], with_stats=False)
    assert read(tpu, helper) == {
        ("/device:TPU:1", "fusion.1", 0, 20),
        ("/device:TPU:1", "ar-done", 20, 30),
        ("/device:TPU:1", "ar-start", 5, 28),
    }


def test_traces_of_gpus_have_streams_of_kernels():
    gpu = plane(
        "/device:GPU:0",
        [
            ("Stream #14(Compute)", [("loop_add_fusion", 0, 20, "fusion.1")]),
            ("Stream #20(Compute)", [("ncclDevKernel_AllReduce", 10, 28, "ar-start")]),
            ("Stream #21(MemcpyH2D)", [("MemcpyH2D", 0, 5, None)]),
            ("XLA Modules", [("jit_f", 0, 40, "jit_f")]),
        ],
        with_stats=True,
    )
    found = read(gpu)
    assert found == {
        ("/device:GPU:0", "fusion.1", 0, 20),
        ("/device:GPU:0", "ar-start", 10, 28),
        ("/device:GPU:0", "MemcpyH2D", 0, 5),
    }
    spans = [DeviceOp(*op, is_ours=op[1] != "MemcpyH2D") for op in found]
    measured = step_times(spans, StepProgram(TEXT), 1.0)
    assert measured.communication["gradients"] == pytest.approx(18e-9)
    assert measured.overlap_time == pytest.approx(10e-9)
    assert measured.other_compute_time == 0


INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)))


def instants(intervals):
    return {t for start, end in intervals for t in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_intervals_hold_the_same_instants_as_sets_do(first, second):
    for found, expected in (
        (union(first), instants(first)),
        (intersection(first, second), instants(first) & instants(second)),
    ):
        assert instants(found) == expected
        # Disjoint, not even touching, and in order.
        assert all(a[1] < b[0] for a, b in itertools.pairwise(found))
        assert all(start < end for start, end in found)
    assert length(first) == len(instants(first))
    assert length(intersection(first, second)) <= min(length(first), length(second))
