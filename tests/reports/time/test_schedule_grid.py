"""A schedule as lines of text."""

import jaxslowmo as js


def test_a_column_per_tick():
    assert js.reports.schedule_grid(js.schedules.zero_bubble(2, 2)).splitlines() == [
        "ticks 0 to 6",
        "0 | F0 F1 .  I0 W0 I1 W1",
        "1 | .  F0 I0 F1 I1 W0 W1",
    ]


def test_chunks_and_an_f_and_a_b_in_one_tick():
    lines = js.reports.schedule_grid(js.schedules.interleaved(2, 2, 2)).splitlines()
    assert lines[1].startswith("0 | 0F0 0F1 1F0 1F1")
    table = js.schedules.lockstep(2, 3, backward_weight=0.0, send=1.0)
    lines = js.reports.schedule_grid(table).splitlines()
    assert lines[1:] == ["0 | F0    F1    F2+B0 B1    B2", "1 | .     F0+B0 F1+B1 F2+B2 ."]


def test_blocks_are_as_wide_as_asked_and_hide_the_middle():
    schedule = js.schedules.gpipe(2, 40)
    whole = js.reports.schedule_grid(schedule, width=33, whole=True).splitlines()
    assert max(map(len, whole)) <= 33
    assert sum(line.startswith("ticks") for line in whole) == 12
    short = js.reports.schedule_grid(schedule, width=33).splitlines()
    assert short[:12] == whole[:12]
    assert short[12] == "ticks 28 to 69 are not shown"
    assert short[13:] == whole[-6:]
    # One tick at least, however narrow.
    assert "\n0 | F0\n" in js.reports.schedule_grid(js.schedules.gpipe(2, 2), width=1)
