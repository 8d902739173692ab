"""Reading compiled text; that of TPUs in `programs` is shortened from what libtpu 0.0.51 prints."""

from pathlib import Path

import pytest

from jaxslowmo.reports import _hlo as hlo

GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"


def text_of(name: str) -> str:
    return Path(__file__).with_name("programs").joinpath(f"{name}.hlo").read_text()


def read_hlo(text: str, *options) -> hlo.ProgramCollectives:
    module = hlo.parse_module("HloModule jit_f, num_partitions=8\n" + text)
    return hlo.read_collectives(module, True, *options)


def leaves(block, conditional=False):
    """Yield every collective of a tree, and whether it is inside a conditional."""
    for node in block:
        if isinstance(node, hlo.Collective):
            yield node, conditional
        else:
            inside = isinstance(node, hlo.Branches)
            for inner in node.blocks if inside else (node.block,):
                yield from leaves(inner, conditional or inside)


def read(text: str) -> list[tuple]:
    """(name, bytes, conditional) of each collective."""
    program = read_hlo(text)
    return [(c.name, c.nbytes, inside) for c, inside in leaves(program.block)]


def entry(body: str) -> str:
    return "ENTRY %main (p: f32[64,16]) -> f32[64,16] {\n" + body + "\n}\n"


P = "  %p = f32[64,16]{1,0:T(8,128)} parameter(0)\n"


F = "f32[64,16]{1,0}"
PERMUTED = f"({F}, {F}, u32[]{{:S(2)}}, u32[]{{:S(2)}})"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{F} all-reduce({F} %p), {GROUPS}", ("all-reduce", 4096)),
        (f"f32[8,16]{{1,0}} reduce-scatter(%p), {GROUPS}", ("reduce-scatter", 4096)),
        ("f32[512,16]{1,0} all-gather(%p), replica_groups={}", ("all-gather", 32768)),
        (
            f"{PERMUTED} collective-permute-start(%p), source_target_pairs={{{{0,1}},{{1,0}}}}",
            ("collective-permute", 4096),
        ),
        (
            f"({F}, {F}) all-reduce(%p, /*index=1*/%p), replica_groups=mesh['a'=8] {{'a'}}",
            ("all-reduce", 8192),
        ),
        (f"{F} ragged-all-to-all(%p, %p, %o, %o, %o, %o), {GROUPS}", ("ragged-all-to-all", 4096)),
        (f'{F} add(%p, %p), metadata={{op_name="all-reduce(x"}}', None),
        (f"({F}, u32[], token[]) send(%p, %t), is_host_transfer=true", None),
    ],
)
def test_single_instructions(line, expected):
    found = read(text_of("wrapped") + entry(P + "  ROOT %r = " + line))
    assert found == ([(*expected, False)] if expected else [])


# Printers write an asynchronous X with the suffixes -start, -update and -done, and all that X has.
ASYNC_TYPE = "((f32[64,16]{1,0}), f32[8,16]{1,0}, s32[])"


ASYNCHRONOUS = {
    "async": "calls=%wrapped",
    "call": 'async_execution_thread="parallel", to_apply=%wrapped',
    "custom-call": 'custom_call_target="t", called_computations={%wrapped}',
    "reduce-scatter": GROUPS,
}


@pytest.mark.parametrize("opcode", ASYNCHRONOUS)
def test_what_is_asynchronous_counts_once(opcode):
    attributes = ASYNCHRONOUS[opcode]
    for repeated in ("", f", {attributes}"):
        body = P + (
            f"  %s = {ASYNC_TYPE} {opcode}-start(%p), {attributes}\n"
            f"  %u = {ASYNC_TYPE} {opcode}-update(%s){repeated}\n"
            f"  ROOT %d = f32[8,16]{{1,0}} {opcode}-done(%u){repeated}"
        )
        assert read(text_of("wrapped") + entry(body)) == [("reduce-scatter", 4096, False)]


def test_tpu_fused_reduce_scatter_and_the_same_pair_outside_a_fusion():
    assert read(text_of("fused_reduce_scatter")) == [("reduce-scatter", 16576 * 1024 * 4, False)]
    body = P + (
        f"  %ar = f32[64,16]{{0:T(1024)S(1)}} all-reduce(%p), {GROUPS}\n"
        "  ROOT %ds = f32[8,16]{0:T(1024)S(1)} dynamic-slice(%ar, %multiply.1)"
    )
    assert read(entry(body)) == [("all-reduce", 4096, False)]


def test_tpu_collective_spread_over_fusions_counts_once():
    assert read(text_of("spread_all_gather")) == [("all-gather", 32768, False)]


def test_transfers_between_tpu_slices():
    text = text_of("two_slices")
    reduce, send, recv = (c for c, _ in leaves(read_hlo(text, 16).block))
    assert reduce.groups == (tuple(range(8)), tuple(range(8, 16)))  # repeated for both slices
    assert (send.name, send.nbytes, send.pattern) == ("send", 4096, "reduce-scatter")
    assert (recv.name, recv.nbytes) == ("recv", 2048)
    assert send.groups == tuple((i, i + 8) for i in range(8))
    # Slices in another order than the mesh are not guessed.
    program = read_hlo(text, 16, False)
    assert [c.groups for c, _ in leaves(program.block)] == [None, None, None]


def branch(name: str, line: str) -> str:
    return f"%{name} (q: f32[64,16]) -> f32[64,16] {{\n  %q = f32[64,16] parameter(0)\n{line}\n}}\n"


def test_conditionals_of_all_spellings_and_phases_of_scopeless_collectives():
    scoped = '  %m = f32[64,16] add(%q, %q), metadata={op_name="jit(f)/cond/phase:slow/add"}\n'
    text = branch("yes", scoped + f"  ROOT %r = f32[64,16] all-reduce(%m), {GROUPS}")
    text += branch("no", "  ROOT %c = f32[64,16] copy(%q)")
    for which in (
        "conditional(%i, %p, %p), branch_computations={%no, %yes}",
        "conditional(%i, %p, %p), true_computation=%yes, false_computation=%no",
        "conditional-start(%i, %p, %p), branch_computations={%no, %yes}",
    ):
        body = P + f"  ROOT %k = f32[64,16] {which}"
        (node,) = read_hlo(text + entry(body)).block
        assert isinstance(node, hlo.Branches)
        assert [c.phase for c, inside in leaves((node,)) if inside] == ["slow"]


@pytest.mark.parametrize(
    ("step", "bound", "last", "config", "trips"),
    [
        ("1", "%stop", "%n", "", 7),
        ("1", "%carried", "%five", "", 2),
        ("1", "%carried", "%n", "", None),
        ("1", "%carried", "%n", ', backend_config={"known_trip_count":{"n":"5"}}', 5),
    ],
)
def test_trip_counts(step, bound, last, config, trips):
    """From 3 to 10, or to 5; of a loop that begins asynchronously, too."""
    text = text_of("loop").replace("ONE", step).replace("BOUND", bound).replace("LAST", last)
    for opcode in (" while(", " while-start("):
        program = text.replace("CONFIG", config).replace(" while(", opcode)
        (loop,) = read_hlo(program).block
        assert isinstance(loop, hlo.Loop)
        assert loop.trip_count == trips


# By collective, what a send is a part of, and devices of a group: bytes that one sends of 800.
WIRE_BYTES = {
    ("all-reduce", "", 8): 1400,
    ("all-reduce", "", 0): 1600,  # of a large group
    ("all-gather", "", 2): 400,
    ("recv", "all-reduce", 8): 0,
    ("send", "", 8): 800,
    ("send", "all-reduce", 4): 1200,
    ("send", "all-gather", 8): 5600,  # its operand is the shard
}


def test_bytes_on_the_wire_of_a_ring_and_of_permutes_on_average():
    for (name, pattern, group_size), sent in WIRE_BYTES.items():
        collective = hlo.Collective(name, (), 800, (), pattern=pattern)
        assert hlo.wire_bytes(collective, group_size) == sent, (name, pattern, group_size)
    pairs = hlo.Collective("collective-permute", ((0, 1), (1, 1), (2, 0)), 800, (), pairs=True)
    assert [hlo.wire_bytes(pairs, 4, devices) for devices in (0, 4, 8)] == [800, 400, 200]


# Groups of devices, and the axes that they stand for

DEVICE = ((0, 1, 2, 3), (4, 5, 6, 7))
REPLICA = ((0, 4), (1, 5), (2, 6), (3, 7))
MESH = hlo.MeshAxes((("replica", 2), ("device", 4)), tuple(range(8)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", DEVICE),
        ("{}", ()),
        ("[4,2]<=[2,4]T(1,0)", REPLICA),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['axis_0'=2,'axis_1'=4,'axis_2'=1] {'axis_1'}", DEVICE),
        (
            "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,2,2]T(0,2,1)) {'axis_0':(2)2}",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
        ),
        ("something else", None),
    ],
)
def test_parse_groups(text, expected):
    groups = hlo.parse_groups(text)
    if expected is None:
        assert groups is None
    else:
        assert sorted(groups) == sorted(expected)


@pytest.mark.parametrize(
    ("groups", "are_pairs", "expected"),
    [
        (((3, 2, 1, 0), (7, 6, 5, 4)), False, ("device", 4)),
        (REPLICA, False, ("replica", 2)),
        ((), False, ("replica,device", 8)),
        (((0, 1), (2, 3), (4, 5), (6, 7)), False, ("?", 2)),
        (None, False, ("?", 0)),
        (((0, 1), (1, 2), (7, 4)), True, ("device", 4)),
        (((0, 5), (5, 0)), True, ("replica,device", 8)),
        (((0, 9),), True, ("?", 2)),
    ],
)
def test_axis_of_groups_and_of_pairs(groups, are_pairs, expected):
    assert hlo.axis_of(groups, are_pairs, (MESH,)) == expected
