"""Tables in torch's notation."""

import jaxslowmo as js
from jaxslowmo.pipeline.schedules import Operation

ROWS = ["0F0,0F1,,0B0,,0B1", ",1F0,1B0,1F1,1B1"]


def test_a_table_is_read_as_it_is_printed():
    schedule = js.schedules.from_table(ROWS, name="mine")
    assert (schedule.orders(), schedule.name) == (ROWS, "mine")
    assert schedule.rows[1][:2] == (None, Operation("F", 1, 0, 0))


def test_placement_and_forward_only_are_read_off_the_rows():
    for made in (js.schedules.zbv(2, 3), js.schedules.gpipe(2, 2, forward_only=True)):
        assert js.schedules.from_table(made.orders(), name=made.name) == made
    assert js.schedules.zbv(2, 3).placement == (0, 1, 1, 0)


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


def test_columns_are_ticks_if_they_keep_the_dependencies_and_are_no_longer():
    late = js.schedules.from_table(["0F0,,,0B0", ",1F0,1B0,"])
    assert [len(tick[0]) for tick in late.ticks()] == [1, 0, 0, 1]
    longer = js.schedules.from_table(["0F0,,,,0B0", ",,1F0,1B0,"])  # idle columns are left out
    assert longer.ticks() == late.ticks()
    early = js.schedules.from_table(["0F0,0B0", "1F0,1B0"])  # 1F0 needs 0F0 of an earlier tick
    assert early.ticks() == late.ticks()
