"""Operations read off the traces of accelerators, from traces written by hand."""

import warnings

import pytest
from jax.profiler import ProfileData

from jaxslowmo.reports.time._step_program import StepProgram
from jaxslowmo.reports.time._times import DeviceOp, step_times
from jaxslowmo.reports.time._trace import device_ops
from support.compiled_step import TEXT


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
