"""Tables as others write them, and what is none."""

import pytest

import jaxslowmo as js
from jaxslowmo.pipeline.schedules import Operation

ROWS = ["0F0,0F1,,0B0,,0B1", ",1F0,1B0,1F1,1B1"]


def test_strings_and_operations_are_one_table():
    schedule = js.schedules.from_table(ROWS)
    assert schedule.orders() == ROWS
    assert schedule.rows[1][:2] == (None, Operation("F", 1, 0, 0))
    assert js.schedules.from_table(schedule.rows) == schedule
    assert js.schedules.from_table(schedule.cells) == schedule
    assert js.schedules.from_table(iter(schedule.rows), placement=[0, 1]) == schedule
    assert js.schedules.from_table([row.split(",") for row in ROWS]) == schedule  # csv.reader
    assert js.schedules.from_table([" 0F0 , 0B0"], name="mine").orders() == ["0F0,0B0"]


def test_placement_is_read_off_strings_and_given_for_operations():
    v = js.schedules.zbv(2, 3)
    assert js.schedules.from_table(v.orders()).placement == (0, 1, 1, 0)
    again = js.schedules.from_table(v.rows, placement=v.placement, name="zbv")
    assert again == v
    round_robin = js.schedules.interleaved(2, 2, 2)
    assert js.schedules.from_table(round_robin.rows).placement == (0, 1, 0, 1)


def test_a_forward_only_table():
    schedule = js.schedules.from_table(["0F0,0F1", ",1F0,1F1"])
    assert schedule.forward_only
    assert schedule.simulate().bubble == 0


def test_an_overlap_shares_a_tick_where_it_can():
    rows = ["0F0,0F1,,(0F2;0B0)OVERLAP_F_B,0B1,,0B2", ",1F0,1B0,1F1,1B1,1F2,1B2"]
    schedule = js.schedules.from_table(rows)
    assert schedule.orders() == rows
    assert schedule.ticks()[3][0] == (Operation("F", 0, 0, 2), Operation("BW", 0, 0, 0))


def test_an_overlap_whose_halves_wait_for_each_other_is_two_ticks():
    rows = ["0F0,(0F1;0B0)OVERLAP_F_B,0B1", "1F0,(1F1;1B0)OVERLAP_F_B,1B1"]
    schedule = js.schedules.from_table(rows)
    kinds = [["+".join(op.kind for op in cell) for cell in tick] for tick in schedule.ticks()]
    assert kinds == [["F", ""], ["", "F"], ["F", ""], ["", "F+BW"], ["BW", "BW"], ["BW", ""]]
    assert schedule.orders() == rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0F0,0B0", "one string per device stage, got the string '0F0,0B0'"),
        ([], "must hold one row per device stage, got none"),
        (["", ""], "must hold operations, got idle columns only"),
        (["0F0,0X0"], "'0X0' in column 1 of stage 0 is no operation"),
        (["0F0,0SEND_F0,0B0"], "'0SEND_F0' in column 1 of stage 0"),
        (["0F0,(0F1;0B0),0B1"], r"'\(0F1;0B0\)' in column 1 of stage 0"),
        (["0F0,-1B0"], "'-1B0' in column 1"),
        (["0F0,0B0,1F0", "1B0"], "stage 1 of the model is in the rows of stages 0 and 1"),
        (["0F0,0B0", "2F0,2B0"], "no row holds stage 1 of the model"),
        (["0F0,1F0,1B0,0B0", "2F0,2B0"], "each of 2 device stages 2 times"),
        (["0F0,0B0", ""], "each of 2 device stages 1 times"),
        (["0F0,0F1,0B0", "1F0,1B0,1F1,1B1"], "gradient of the input .* microbatch 1 on stage 0"),
        (["0F0,0B0", [None]], "all be strings or all be sequences"),
        ([["0F0", 3]], "a cell must be an Operation, a sequence of them or None, got '0F0'"),
        ([["0X0"]], "'0X0' in column 0 of stage 0 is no operation"),
        (None, "must hold one row per device stage, got None"),
        ([3], "a row must be a string or a sequence of operations, got 3"),
        ([b"0F0"], "a row must be a string or a sequence of operations, got b'0F0'"),
        ([[3]], "a cell must be an Operation, a sequence of them or None, got 3"),
        ([[Operation("F", 0, 0, 0), Operation("F", 0, -1, 0)]], "`chunk` must be in 0 .. 0"),
        ([[Operation("F", 1, 0, 0)]], "row of stage 0 holds an operation of stage 1"),
    ],
)
def test_what_is_no_table(rows, message):
    with pytest.raises(ValueError, match=message):
        js.schedules.from_table(rows)


def test_a_placement_that_the_rows_do_not_have():
    with pytest.raises(ValueError, match=r"`placement` is \(1, 0\), but the rows hold \(0, 1\)"):
        js.schedules.from_table(ROWS, placement=(1, 0))


def test_columns_that_are_no_ticks():
    with pytest.raises(ValueError, match="1F0 of stage 1 needs F of microbatch 0 on stage 0"):
        js.schedules.from_table(["0F0,,0B0", "1F0,1B0"], lockstep=True)
