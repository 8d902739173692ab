"""Reading compiled text. The TPU programs are shortened from what libtpu 0.0.51 prints."""

# ruff: noqa: E501
# (the long lines are the compilers' own)

import pytest

from jaxslowmo.reports.communication._collectives import (
    Branches,
    Collective,
    Loop,
    dtype_of,
    leaves,
)
from jaxslowmo.reports.communication._hlo import read_hlo
from jaxslowmo.reports.communication._hlo_text import parse_instruction, shapes

GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"


def read(text: str, **options) -> list[tuple]:
    """(name, bytes, conditional) of each collective."""
    program = read_hlo("HloModule jit_f, num_partitions=8\n" + text, **options)
    return [(c.name, c.nbytes, inside) for c, inside in leaves(program.block)]


def entry(body: str) -> str:
    return "ENTRY %main (p: f32[64,16]) -> f32[64,16] {\n" + body + "\n}\n"


P = "  %p = f32[64,16]{1,0:T(8,128)} parameter(0)\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"f32[64,16]{{1,0}} all-reduce(%p), {GROUPS}, to_apply=%add", ("all-reduce", 4096)),
        (f"f32[64,16]{{1,0}} all-reduce(f32[64,16]{{1,0}} %p), {GROUPS}", ("all-reduce", 4096)),
        (f"f32[64,16]{{1,0}} all-reduce-start(%p), {GROUPS}", ("all-reduce", 4096)),
        (f"f32[8,16]{{1,0}} reduce-scatter(%p), {GROUPS}", ("reduce-scatter", 4096)),
        (f"f32[512,16]{{1,0}} all-gather(%p), {GROUPS}", ("all-gather", 32768)),
        (
            f"(f32[64,16]{{1,0}}, f32[512,16]{{1,0}}) all-gather-start(%p), {GROUPS}",
            ("all-gather", 32768),
        ),
        (
            "(f32[64,16]{1,0}, f32[64,16]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) "
            "collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}",
            ("collective-permute", 4096),
        ),
        (
            "(f32[64,16]{1,0}, f32[64,16]{1,0}) all-reduce(%p, /*index=1*/%p), "
            "replica_groups=mesh['a'=8] {'a'}",
            ("all-reduce", 8192),
        ),
        (f"f32[64,16]{{1,0}} collective-broadcast(%p), {GROUPS}", ("collective-broadcast", 4096)),
        (
            f"f32[64,16]{{1,0}} ragged-all-to-all(%p, %p, %o, %o, %o, %o), {GROUPS}",
            ("ragged-all-to-all", 4096),
        ),
        ("f32[64,16]{1,0} all-reduce-done(%p)", None),
        ('f32[64,16]{1,0} add(%p, %p), metadata={op_name="all-reduce(x"}', None),
        ("(f32[64,16]{1,0}, u32[], token[]) send(%p, %t), is_host_transfer=true", None),
    ],
)
def test_single_instructions(line, expected):
    found = read(entry(P + "  ROOT %r = " + line))
    assert found == ([(*expected, False)] if expected else [])


def test_groups_in_mesh_form_with_device_ids_survive_the_comma():
    line = (
        "(f32[1,4]{1,0}, f32[1,4]{1,0}) all-to-all(%a, %b), channel_id=1, "
        "replica_groups=mesh['x'=4,'y'=2], device_ids=([2,2,2]T(0,2,1)) {'x':(2)2}, "
        'metadata={op_name="jit(f)/mul, \\"quoted, {" stack_frame_id=2}'
    )
    parsed = parse_instruction("r", line)
    assert parsed.operands == ("a", "b")
    assert parsed.attributes["replica_groups"] == (
        "mesh['x'=4,'y'=2], device_ids=([2,2,2]T(0,2,1)) {'x':(2)2}"
    )
    assert parsed.attributes["metadata"].endswith("stack_frame_id=2}")


def test_async_wrapping_counts_once():
    text = (
        f"%wrapped (q: f32[64,16]) -> f32[8,16] {{\n  %q = f32[64,16]{{1,0}} parameter(0)\n"
        f"  ROOT %rs = f32[8,16]{{1,0}} reduce-scatter(%q), {GROUPS}, to_apply=%add\n}}\n"
    )
    body = P + (
        "  %s = ((f32[64,16]{1,0}), f32[8,16]{1,0}) async-start(%p), calls=%wrapped\n"
        "  ROOT %d = f32[8,16]{1,0} async-done(%s), calls=%wrapped"
    )
    assert read(text + entry(body)) == [("reduce-scatter", 4096, False)]


# Printers write an asynchronous X with the suffixes -start, -update and -done, and all that X has.
ASYNC_TYPE = "((f32[64,16]{1,0}), f32[8,16]{1,0}, s32[])"
WRAPPED = f"""
%wrapped (q: f32[64,16]) -> f32[8,16] {{
  %q = f32[64,16]{{1,0}} parameter(0)
  ROOT %rs = f32[8,16]{{1,0}} reduce-scatter(%q), {GROUPS}, to_apply=%add
}}, execution_thread="parallel"
"""


@pytest.mark.parametrize(
    ("opcode", "attributes"),
    [
        ("async", "calls=%wrapped"),
        ("fusion", "kind=kCustom, calls=%wrapped"),
        ("call", 'async_execution_thread="parallel", to_apply=%wrapped'),
        ("custom-call", 'custom_call_target="t", called_computations={%wrapped}'),
        ("one-to-come", "calls=%wrapped"),
    ],
)
@pytest.mark.parametrize("repeated", [False, True])
def test_collectives_in_asynchronous_computations_count_once(opcode, attributes, repeated):
    again = f", {attributes}" if repeated else ""
    body = P + (
        f"  %s = {ASYNC_TYPE} {opcode}-start(%p), {attributes}\n"
        f"  %u = {ASYNC_TYPE} {opcode}-update(%s){again}\n"
        f"  ROOT %d = f32[8,16]{{1,0}} {opcode}-done(%u){again}"
    )
    assert read(WRAPPED + entry(body)) == [("reduce-scatter", 4096, False)]


@pytest.mark.parametrize(
    ("opcode", "nbytes"), [("reduce-scatter", 4096), ("all-to-all", 4096), ("all-gather", 32768)]
)
def test_asynchronous_collectives_count_once(opcode, nbytes):
    body = P + (
        f"  %s = {ASYNC_TYPE} {opcode}-start(%p), {GROUPS}\n"
        f"  %u = {ASYNC_TYPE} {opcode}-update(%s)\n"
        f"  ROOT %d = f32[8,16]{{1,0}} {opcode}-done(%u)"
    )
    assert read(entry(body)) == [(opcode, nbytes, False)]


def test_asynchronous_fusions_inside_each_other_and_two_of_one():
    inner = (
        "%inner (r: f32[64,16]) -> f32[8,16] {\n  %r = f32[64,16]{1,0} parameter(0)\n"
        f"  %t = {ASYNC_TYPE} fusion-start(%r), kind=kCustom, calls=%wrapped\n"
        "  ROOT %e = f32[8,16]{1,0} fusion-done(%t)\n}\n"
    )
    body = P + (
        f"  %s = {ASYNC_TYPE} fusion-start(%p), kind=kCustom, calls=%inner\n"
        f"  %z = {ASYNC_TYPE} fusion-start(%p), kind=kCustom, calls=%wrapped\n"
        "  %d = f32[8,16]{1,0} fusion-done(%s)\n"
        "  ROOT %e = f32[8,16]{1,0} fusion-done(%z)"
    )
    assert read(WRAPPED + inner + entry(body)) == [("reduce-scatter", 4096, False)] * 2


def test_asynchronous_conditionals_and_loops():
    which = "branch_computations={%wrapped, %wrapped}"
    (node,) = read_hlo(
        WRAPPED + entry(P + f"  ROOT %k = {ASYNC_TYPE} conditional-start(%i, %p), {which}")
    ).block
    assert isinstance(node, Branches)
    loop = WHILE_TEXT.replace(" while(", " while-start(")
    (node,) = read_hlo("HloModule f, num_partitions=8\n" + loop).block
    assert isinstance(node, Loop)
    assert node.trip_count == 10


def test_what_starts_without_a_computation_moves_nothing():
    body = P + (
        "  %c = (f32[64,16]{1,0}, f32[64,16]{1,0}, u32[]) copy-start(%p)\n"
        f"  %s = {ASYNC_TYPE} slice-start(%p), slice={{[0:8], [0:16]}}, "
        'metadata={op_name="fusion(calls=%wrapped"}\n'
        "  ROOT %d = f32[64,16]{1,0} copy-done(%c)"
    )
    assert read(WRAPPED + entry(body)) == []


ALL_REDUCE_SCATTER = f"""
%all-reduce-scatter (input: f32[16384,1024]) -> f32[2072,1024] {{
  %input = f32[16384,1024]{{1,0:T(8,128)}} parameter(0)
  %constant.3 = f32[] constant(0)
  %pad = f32[16576,1024]{{1,0:T(8,128)}} pad(%input, %constant.3), padding=0_192x0_0
  %all-reduce.1 = f32[16576,1024]{{1,0:T(8,128)}} all-reduce(%pad), channel_id=2, {GROUPS}
  ROOT %dynamic-slice.1 = f32[2072,1024]{{1,0:T(8,128)S(1)}} dynamic-slice(%all-reduce.1, %m, %c)
}}
ENTRY %main.0_spmd (param.1: f32[16384,1024]) -> f32[2072,1024] {{
  %param.1 = f32[16384,1024]{{1,0:T(8,128)}} parameter(0), metadata={{op_name="x"}}
  ROOT %fusion = f32[2072,1024]{{1,0:T(8,128)S(1)}} fusion(%param.1), kind=kCustom, calls=%all-reduce-scatter, backend_config={{"emitter":"SingleInputAllReduceScatterFusion","debug":"{{1 (a"}}
}}
"""


def test_tpu_fused_reduce_scatter():
    assert read(ALL_REDUCE_SCATTER) == [("reduce-scatter", 16576 * 1024 * 4, False)]


def test_tpu_all_reduce_and_slice_outside_a_fusion_stays_an_all_reduce():
    body = (
        "  %param.1 = f32[1048576]{0:T(1024)} parameter(0)\n"
        f"  %all-reduce = f32[1048576]{{0:T(1024)S(1)}} all-reduce(%param.1), {GROUPS}\n"
        "  ROOT %ds = f32[131072]{0:T(1024)S(1)} dynamic-slice(%all-reduce, %multiply.1)"
    )
    assert read(entry(body)) == [("all-reduce", 4194304, False)]


ASYNC_FUSION = """
%fused_computation.12 (param_0.24: f32[64,16]) -> (f32[64,16], f32[512,16], u32[]) {
  %param_0.24 = f32[64,16]{1,0:T(8,128)} parameter(0)
  %all-gather.5 = f32[512,16]{1,0:T(8,128)} all-gather(%param_0.24), REPLICA_GROUPS, frontend_attributes={chain_id="0"}
  ROOT %custom-call.1 = (f32[64,16]{1,0}, f32[512,16]{1,0}, u32[]) custom-call(%all-gather.5), custom_call_target="AsyncCollectiveStart"
}
%async_collective_fusion.24 (param_0.27: f32[64,16]) -> (f32[64,16], f32[512,16]) {
  %param_0.27 = f32[64,16]{1,0:T(8,128)} parameter(0)
  %all-gather.7 = f32[512,16]{1,0} all-gather(%param_0.27), REPLICA_GROUPS, frontend_attributes={chain_id="0"}
  ROOT %tuple.2 = (f32[64,16]{1,0}, f32[512,16]{1,0}) tuple(%param_0.27, %all-gather.7)
}
%fused_computation.20 (param_0.46: f32[64,16]) -> f32[512,16] {
  %param_0.46 = f32[64,16]{1,0:T(8,128)} parameter(0)
  %all-gather.21 = f32[512,16]{1,0} all-gather(%param_0.46), REPLICA_GROUPS, frontend_attributes={chain_id="0"}
  ROOT %custom-call.3 = f32[512,16]{1,0} custom-call(%param_0.46, %all-gather.21), custom_call_target="AsyncCollectiveDone"
}
ENTRY %main.0_spmd (p: f32[64,16]) -> f32[512,16] {
  %p = f32[64,16]{1,0} parameter(0)
  %async-collective-start = (f32[64,16]{1,0}, f32[512,16]{1,0}, u32[]) fusion(%p), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%fused_computation.12
  %fusion.24 = (f32[64,16]{1,0}, f32[512,16]{1,0}) fusion(%p), kind=kOutput, calls=%async_collective_fusion.24
  ROOT %async-collective-done = f32[512,16]{1,0} fusion(%p), kind=kCustom, calls=%fused_computation.20
}
""".replace("REPLICA_GROUPS", GROUPS)


def test_tpu_collective_spread_over_fusions_counts_once():
    assert read(ASYNC_FUSION) == [("all-gather", 32768, False)]


MULTI_SLICE = """
ENTRY %main.0_spmd (p: f32[64,16]) -> f32[64,16] {
  %p = f32[64,16]{1,0} parameter(0)
  %ar = f32[64,16]{1,0} all-reduce(%p), replica_groups={{0,1,2,3,4,5,6,7}}
  %after-all = token[] after-all(), frontend_attributes={MegascaleRendezvousKeyName="rs_0"}
  %send = (f32[64,16]{1,0}, u32[], token[]) send(%ar, %after-all), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="REDUCE_SCATTER"}
  %recv = (f32[32,16]{1,0}, u32[], token[]) recv(%after-all), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="REDUCE_SCATTER"}
  %send-done = token[] send-done(%send), channel_id=3, is_host_transfer=true
  ROOT %recv-done = (f32[32,16]{1,0}, token[]) recv-done(%recv), channel_id=2, is_host_transfer=true
}
"""


def test_transfers_between_tpu_slices():
    text = "HloModule jit_f, num_partitions=8\n" + MULTI_SLICE
    reduce, send, recv = (c for c, _ in leaves(read_hlo(text, 16).block))
    assert isinstance(reduce, Collective)
    assert reduce.groups == (tuple(range(8)), tuple(range(8, 16)))  # repeated for both slices
    assert (send.name, send.nbytes, send.pattern) == ("send", 4096, "reduce-scatter")
    assert (recv.name, recv.nbytes) == ("recv", 2048)
    assert send.groups == tuple((i, i + 8) for i in range(8))


def test_slices_in_another_order_than_the_mesh_are_not_guessed():
    text = "HloModule jit_f, num_partitions=8\n" + MULTI_SLICE
    program = read_hlo(text, 16, slice_major=False)
    assert [c.groups for c, _ in leaves(program.block)] == [None, None, None]


def branch(name: str, line: str) -> str:
    return f"%{name} (q: f32[64,16]) -> f32[64,16] {{\n  %q = f32[64,16] parameter(0)\n{line}\n}}\n"


def test_conditionals_of_both_spellings_and_phases_of_scopeless_collectives():
    scoped = '  %m = f32[64,16] add(%q, %q), metadata={op_name="jit(f)/cond/phase:slow/add"}\n'
    text = branch("yes", scoped + f"  ROOT %r = f32[64,16] all-reduce(%m), {GROUPS}")
    text += branch("no", "  ROOT %c = f32[64,16] copy(%q)")
    for which in (
        "branch_computations={%no, %yes}",
        "true_computation=%yes, false_computation=%no",
    ):
        body = P + f"  ROOT %k = f32[64,16] conditional(%i, %p, %p), {which}"
        module = "HloModule jit_f, num_partitions=8\n" + text + entry(body)
        (node,) = read_hlo(module).block
        assert isinstance(node, Branches)
        assert [c.phase for c, inside in leaves((node,)) if inside] == ["slow"]


WHILE = """
%body (t: (s32[], f32[64,16], s32[])) -> (s32[], f32[64,16], s32[]) {
  %t = (s32[]{:T(128)}, f32[64,16]{1,0}, s32[]) parameter(0)
  %one = s32[] constant(ONE)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[64,16]{1,0} get-tuple-element(%t), index=1
  %n = s32[] get-tuple-element(%t), index=2
  %next = s32[] add(%i, %one)
  %y = f32[64,16]{1,0} all-reduce(%x), GROUPS
  ROOT %out = (s32[], f32[64,16]{1,0}, s32[]) tuple(%next, %y, %n)
}
%condition (u: (s32[], f32[64,16], s32[])) -> pred[] {
  %u = (s32[]{:T(128)}, f32[64,16]{1,0}, s32[]) parameter(0)
  %stop = s32[] constant(10)
  %j = s32[] get-tuple-element(%u), index=0
  %carried = s32[] get-tuple-element(%u), index=2
  ROOT %lt = pred[] compare(%j, BOUND), direction=LT
}
ENTRY %main (p: f32[64,16], n: s32[]) -> f32[64,16] {
  %p = f32[64,16]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %seven = s32[] constant(7)
  %zero = s32[] constant(0)
  %start = s32[] copy(%zero)
  %init = (s32[], f32[64,16]{1,0}, s32[]) tuple(%start, %p, LAST)
  ROOT %w = (s32[], f32[64,16]{1,0}, s32[]) while(%init), condition=%condition, body=%bodyCONFIG
}
""".replace("GROUPS", GROUPS)
WHILE_TEXT = (
    WHILE.replace("ONE", "1").replace("BOUND", "%stop").replace("LAST", "%n").replace("CONFIG", "")
)


@pytest.mark.parametrize(
    ("step", "bound", "last", "config", "trips"),
    [
        ("1", "%stop", "%n", "", 10),
        ("4", "%stop", "%n", "", 3),
        ("1", "%carried", "%seven", "", 7),
        ("1", "%carried", "%n", "", None),
        ("0", "%stop", "%n", "", None),
        ("1", "%carried", "%n", ', backend_config={"known_trip_count":{"n":"5"}}', 5),
    ],
)
def test_trip_counts(step, bound, last, config, trips):
    text = WHILE.replace("ONE", step).replace("BOUND", bound).replace("LAST", last)
    program = read_hlo("HloModule f, num_partitions=8\n" + text.replace("CONFIG", config))
    (loop,) = program.block
    assert isinstance(loop, Loop)
    assert loop.trip_count == trips


def test_types():
    assert shapes("(bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, s4[3], pred[2], token[])") == [
        ("bfloat16", 2048),
        ("int4", 2),
        ("bool", 2),
        ("token", 0),
    ]
    assert dtype_of("f8E4M3FN") == dtype_of("f8e4m3fn") == ("float8_e4m3fn", 8)
    assert dtype_of("i32") == dtype_of("s32") == ("int32", 32)
    assert dtype_of("complex<f32>") == dtype_of("c64") == ("complex64", 64)
