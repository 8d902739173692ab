"""The integers of a schedule: how many rows each stage needs, and to whom it sends."""

import jaxslowmo as js
from jaxslowmo.pipeline._tick_table import tick_table

schedules = js.schedules
CASES = {
    "1f1b": schedules.one_f_one_b(4, 8),
    "gpipe": schedules.gpipe(3, 5),
    "zb_h2": schedules.zero_bubble(4, 8, memory=2),
    "interleaved": schedules.interleaved(4, 8, 2),
    "zbv": schedules.zbv(4, 8),
    "lockstep": schedules.lockstep(4, 8),
    "torch": schedules.from_table(["0F0,0F1,0I0,0W0,0B1", ",1F0,1B0,1F1,1B1"]),
}


def test_a_stage_needs_rows_for_its_own_stash_alone_and_sends_to_neighbours():
    for name in ("1f1b", "gpipe", "zb_h2", "interleaved"):
        assert max(tick_table(CASES[name]).stash) == max(CASES[name].stash)
    down = tick_table(CASES["1f1b"])
    assert (down.stash, down.kept) == ((4, 3, 2, 1), (0, 0, 0, 0))
    assert down.channels == (((0, 1), (1, 2), (2, 3)),)
    assert tick_table(CASES["interleaved"]).channels == (((0, 1), (1, 2), (2, 3), (3, 0)),)
    # The turn of a V stays on its device.
    stay, down, up = tick_table(CASES["zbv"]).channels
    assert (stay, down) == (((3, 3),), ((0, 1), (1, 2), (2, 3)))
    assert up == ((1, 0), (2, 1), (3, 2))
    few, many = (tick_table(schedules.one_f_one_b(2, m)) for m in (4, 32))
    assert (few.stash, few.arrivals) == (many.stash, many.arrivals)
