"""The integers of a schedule: played with names in place of arrays, all is where it is read."""

import pytest

import jaxslowmo as js
from jaxslowmo.pipeline.one_program._tick_table import KINDS, forward_ticks, tick_table

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


class Player:
    """Runs a table with (kind, model stage, microbatch) as values."""

    def __init__(self, schedule, table):
        self.schedule, self.table = schedule, table
        n, self.last = schedule.num_stages, schedule.num_model_stages - 1
        self.x = [[None] * max(table.arrivals[0], 1) for _ in range(n)]
        self.dy = [[None] * max(table.arrivals[1], 1) for _ in range(n)]
        self.stash = [[None] * max(*table.stash, 1) for _ in range(n)]
        self.kept = [[None] * max(*table.kept, 1) for _ in range(n)]
        self.done = []

    def play(self):
        sent = [None] * self.schedule.num_stages
        for t in range(self.table.num_ticks):
            self.receive(self.dy, sent, self.table.backward.arrivals, t, back=True)
            y = [self.forward(t, d) for d in range(self.schedule.num_stages)]
            sent = [self.backward(t, d) for d in range(self.schedule.num_stages)]
            self.receive(self.x, y, self.table.forward.arrivals, t)
        return self.done

    def receive(self, buffers, sent, arrivals, t, back=False):
        for channel, rows in zip(self.table.channels, arrivals, strict=True):
            senders = dict(channel) if back else {to: at for at, to in channel}
            for d, row in enumerate(rows[t]):
                if row >= 0:
                    buffers[d][row] = sent[senders[d]]

    def forward(self, t, d):
        kind, k, m, source, stash, _ = (x[t, d] for x in self.table.forward[:6])
        if KINDS[kind] != "F":
            return None
        if k:
            assert self.x[d][source] == ("y", k - 1, m)
        self.stash[d][stash] = ("stash", k, m)
        self.done.append(("F", d, k, m))
        return "y", k, m

    def backward(self, t, d):
        kind, k, m, source, stash, kept = (x[t, d] for x in self.table.backward[:6])
        if not kind:
            return None
        assert self.stash[d][stash] == ("stash", k, m)
        self.done.append((KINDS[kind], d, k, m))
        if KINDS[kind] == "W":
            assert self.kept[d][kept] == ("kept", k, m)
            return None
        if k < self.last:
            assert self.dy[d][source] == ("dx", k + 1, m)
        if KINDS[kind] == "B":
            self.kept[d][kept] = ("kept", k, m)
        return "dx", k, m


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_is_what_was_written(name):
    schedule = CASES[name]
    table = tick_table(schedule)
    done = Player(schedule, table).play()
    operations = [op for row in schedule.rows for op in row if op]
    assert sorted(done) == sorted(
        (op.kind, op.stage, schedule.model_stage(op), op.microbatch) for op in operations
    )


@pytest.mark.parametrize("name", CASES)
def test_forward_passes_alone_keep_the_order_of_rows(name):
    schedule = CASES[name]
    table = tick_table(schedule, forward_ticks(schedule))
    done = Player(schedule, table).play()
    assert {kind for kind, *_ in done} == {"F"}
    for stage, row in enumerate(schedule.rows):
        own = [(schedule.model_stage(op), op.microbatch) for op in row if op and op.kind == "F"]
        assert [(k, m) for _, d, k, m in done if d == stage] == own


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
