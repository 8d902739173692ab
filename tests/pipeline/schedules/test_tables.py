"""What every table keeps: each operation once, dependencies, the stash that it states."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.pipeline import schedules as package
from jaxslowmo.pipeline.schedules import Operation
from pipeline.schedules.replay import all_once, parsed, replayed


@st.composite
def any_schedules(draw):
    kind = draw(st.sampled_from(sorted(js.schedules.KINDS)))
    p, m = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    options = {}
    if kind in ("gpipe", "interleaved"):
        options["num_chunks"] = draw(st.integers(1, 3))
    if kind == "interleaved":
        m = p * draw(st.integers(1, 3))
        options["warm_up"] = draw(st.sampled_from(["few", "all"]))
    if kind in ("gpipe", "interleaved", "one_f_one_b"):
        options["forward_only"] = draw(st.booleans())
    if kind == "lockstep":
        options["num_chunks"] = draw(st.integers(1, 2))
    if kind == "zero_bubble":
        options["memory"] = draw(st.integers(1, 2))
    return js.schedules.by_name(kind, p, m, **options)


@settings(max_examples=60)
@given(any_schedules())
def test_every_operation_once_and_the_stash_as_stated(schedule):
    done, most = replayed(schedule.orders(), len(schedule.placement))
    assert all_once(schedule, done)
    assert schedule.stash == (tuple(most) if not schedule.forward_only else (0,) * len(most))
    assert schedule.splits == any(letter == "W" for _, letter, _ in done)
    assert Counter(schedule.in_order) == Counter(op for row in schedule.rows for op in row if op)


@settings(max_examples=60)
@given(any_schedules())
def test_ticks_keep_rows_and_one_tick_per_hop(schedule):
    at = {}
    for now, tick in enumerate(schedule.ticks()):
        assert len(tick) == schedule.num_stages
        assert any(tick)
        for stage, operations in enumerate(tick):
            assert len(operations) <= 2
            assert all(operation.stage == stage for operation in operations)
            at |= dict.fromkeys(operations, now)
    for stage, row in enumerate(schedule.rows):
        operations = [operation for operation in row if operation]
        assert [op for tick in schedule.ticks() for op in tick[stage]] == operations
    model = {(schedule.model_stage(op), op.kind[0], op.microbatch): op for op in at}
    for (k, kind, j), op in model.items():
        before = {"F": k - 1, "B": k + 1}.get(kind)
        if (other := model.get((before, kind, j))) and other.stage != op.stage:
            assert at[other] < at[op]


def test_stash_of_the_kinds():
    p, m = 4, 9
    assert js.schedules.gpipe(p, m).stash == (9, 9, 9, 9)
    assert js.schedules.gpipe(p, m, 2).stash == (18, 18, 18, 18)
    assert js.schedules.one_f_one_b(p, m).stash == (4, 3, 2, 1)
    assert js.schedules.zero_bubble(p, m).stash == (4, 4, 4, 4)
    assert js.schedules.zero_bubble(p, m, memory=2).stash == (7, 7, 7, 7)
    assert js.schedules.interleaved(p, 8, 2).stash == (11, 9, 7, 5)
    assert js.schedules.zbv(p, m).stash == (8, 8, 8, 8)


def test_orders_in_torchs_letters():
    assert js.schedules.zero_bubble(2, 2).orders() == [
        "0F0,0F1,0I0,0W0,0I1,0W1",
        "1F0,1I0,1F1,1I1,1W0,1W1",
    ]
    assert js.schedules.interleaved(2, 2, 2).orders()[1] == ",1F0,1F1,,3F0,3B0,3F1,3B1,,1B0,,1B1"
    assert parsed("(0F3;3B1)OVERLAP_F_B,,2I0") == [(0, "F", 3), (3, "B", 1), (2, "I", 0)]


def test_operations_know_their_stage_of_the_model():
    schedule = js.schedules.interleaved(2, 2, 3)
    assert schedule.placement == (0, 1, 0, 1, 0, 1)
    assert schedule.model_stage(Operation("F", 1, 2, 0)) == 5
    assert js.schedules.gpipe(3, 1).placement == (0, 1, 2)


def table(*rows, placement=None, num_microbatches=1, **changed):
    """Rows such as ("F0", "B0"): one chunk, a cell of two as ("F1 B0")."""
    kinds = {"F": "F", "B": "BW", "I": "B", "W": "W", "X": "X"}
    cells = tuple(
        tuple(tuple(Operation(kinds[w[0]], s, 0, int(w[1:])) for w in cell.split()) for cell in row)
        for s, row in enumerate(rows)
    )
    sizes = {"num_stages": len(rows), "num_chunks": 1} | changed
    placement = tuple(range(len(rows))) if placement is None else placement
    return js.pipeline.Schedule(
        "mine", num_microbatches=num_microbatches, placement=placement, cells=cells, **sizes
    )


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [("F0", "B0")],
            {"num_microbatches": 2},
            r"forward pass \(F\) of microbatch 1 on stage 0 .* not 0",
        ),
        ([("F0", "F0", "B0")], {}, r"microbatch 0 on stage 0 of the model must .* once, not 2"),
        ([("F0", "B0", "W0")], {}, r"gradient of the weights .* once, not 2"),
        ([("F0", "I0")], {}, r"gradient of the weights .* once, not 0"),
        ([("F0", "W0")], {}, r"gradient of the input .* once, not 0"),
        ([("F0", "X0")], {}, "unknown kind 'X' .* the kinds are F, B, W, BW"),
        ([("F0", "B0", "F1")], {}, r"`microbatch` must be in 0 .. 0, got Operation"),
        (
            [("F0 F1", "B0", "B1")],
            {"num_microbatches": 2},
            r"must be an F and a B or BW after it, got \['F', 'F'\] on stage 0",
        ),
        (
            [("F0", "B0")],
            {"placement": (1,)},
            r"`placement` must name each of 1 device stages 1 times",
        ),
        ([("F0", "B0")], {"num_stages": 2, "placement": (0, 1)}, "`cells` must hold 2 rows, got 1"),
        (
            [("B0", "F0")],
            {},
            "deadlocks: stage 0 waits at 0B0 for 0F0, which is on stage 0 after 0B0 itself",
        ),
        (
            [("F0", "B0", "F1", "B1"), ("F0", "F1", "B0", "B1")],
            {"num_microbatches": 2},
            "stage 0 waits at 0B0 for 1B0, which is on stage 1 after 1F1, which waits, too",
        ),
    ],
)
def test_tables_that_are_none(rows, options, message):
    with pytest.raises(ValueError, match=message):
        table(*rows, **options)


def test_an_operation_in_the_row_of_another_stage():
    cells = ((Operation("F", 1, 0, 0),),), ((Operation("F", 1, 0, 0),),)
    with pytest.raises(ValueError, match="row of stage 0 holds an operation of stage 1: Operation"):
        js.pipeline.Schedule("mine", 2, 1, 1, (0, 1), cells)


def test_schedules_are_values():
    assert js.schedules.gpipe(2, 2) == js.schedules.gpipe(2, 2)
    assert len({js.schedules.gpipe(2, 2), js.schedules.gpipe(2, 2), js.schedules.gpipe(2, 3)}) == 2


def test_no_source_imports_jax():
    for path in Path(package.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [
                alias.name for alias in getattr(node, "names", []) if isinstance(node, ast.Import)
            ]
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module)
            assert not any(name.split(".")[0] in ("jax", "jaxlib", "optax") for name in names), path
