"""Every table keeps what a replay of its operations needs; those for lockstep are short."""

import heapq
from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from pipeline.schedules.replay import all_once, replayed


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
        p, m = min(p, 4), min(m, 8)
        options["num_chunks"] = draw(st.integers(1, 2))
    if kind == "zero_bubble":
        options["memory"] = draw(st.integers(1, 2))
    return js.schedules.by_name(kind, p, m, **options)


quarters = st.integers(1, 20).map(lambda n: n / 4)
LETTERS = {"F": "F", "B": "I", "W": "W", "BW": "B"}


@settings(max_examples=40)
@given(any_schedules(), st.data(), quarters.map(lambda x: x - 0.25))
def test_a_table_runs_as_its_replay_does(schedule, data, send):
    """Everything once; stash, messages and times as in a replay; ticks that keep all orders."""
    count = len(schedule.placement)
    times = [data.draw(st.lists(quarters, min_size=count, max_size=count)) for _ in "FBW"]
    of = dict(zip("FIW", times, strict=True))
    of["B"] = [b + w for b, w in zip(*times[1:], strict=True)]
    first, *lines = str(schedule).splitlines()
    assert first.startswith(f"{schedule.name}: {schedule.num_stages} stages")
    printed = [line.partition(":")[2].split() for line in lines]
    assert printed == [[x for x in row.split(",") if x] for row in schedule.orders()]
    replay = replayed(schedule.orders(), count, lambda k, letter: of[letter][k], send)
    assert all_once(schedule, replay.done)
    idle = (0,) * schedule.num_stages
    assert schedule.stash == (idle if schedule.forward_only else tuple(replay.most))
    assert schedule.splits == any(letter == "W" for _, letter, _ in replay.done)
    assert schedule.sends == tuple(replay.sends)

    costs = dict(zip(("forward", "backward_input", "backward_weight"), times, strict=True))
    apart = schedule.simulate(**costs, send=send)
    starts, ends = zip(*replay.spans.values(), strict=True)
    assert apart.time == pytest.approx(max(ends) - min(starts))
    for line in apart.timeline:
        for op, start, end in line:
            key = schedule.model_stage(op), LETTERS[op.kind], op.microbatch
            assert (start, end) == pytest.approx(replay.spans[key])
    spans = [line[-1].end - line[0].start for line in apart.timeline]
    work = sum(end - start for start, end in replay.spans.values()) / schedule.num_stages
    assert apart.bubble == pytest.approx(1 - work / max(spans))

    at, together = {}, 0.0
    for now, tick in enumerate(schedule.ticks()):
        assert len(tick) == schedule.num_stages
        assert any(tick)
        assert all(op.stage == stage for stage, cell in enumerate(tick) for op in cell)
        assert all([op.kind for op in cell[:-1]] in ([], ["F"]) for cell in tick)
        at |= {op: now for cell in tick for op in cell}
        lasts = [
            sum(of[LETTERS[op.kind]][schedule.model_stage(op)] for op in cell) for cell in tick
        ]
        together += max(lasts) + send
    locked = schedule.simulate(**costs, send=send, lockstep=True)
    assert locked.time == pytest.approx(together)
    assert locked.bubble == pytest.approx(1 - work / together)
    for stage, row in enumerate(schedule.rows):
        own = [operation for operation in row if operation]
        assert [op for tick in schedule.ticks() for op in tick[stage]] == own
    every = Counter(op for row in schedule.rows for op in row if op)
    assert Counter(list(at)) == every
    model = {(schedule.model_stage(op), op.kind[0], op.microbatch): op for op in at}
    for (k, kind, j), op in model.items():
        other = model.get(({"F": k - 1, "B": k + 1}.get(kind), kind, j))
        if other:
            assert at[other] < at[op] or other.stage == op.stage


def times(*costs):
    return dict(zip(("forward", "backward_input", "backward_weight"), costs, strict=True))


def least_time(p, m, costs, most):
    """Return the least time of all tables with one operation per stage and tick."""

    def options(state, s):
        f, b, w = state[s]
        yield None
        if f < m and f - w < most and (s == 0 or state[s - 1][0] > f):
            yield 0
        if b < f and (s == p - 1 or state[s + 1][1] > b):
            yield 1
        if w < b:
            yield 2

    waiting, known = [(0.0, ((0, 0, 0),) * p)], set()
    while True:
        spent, state = heapq.heappop(waiting)
        if state in known:
            continue
        known.add(state)
        if state == ((m, m, m),) * p:
            return spent
        for chosen in product(*(options(state, s) for s in range(p))):
            if any(x is not None for x in chosen):
                lasts = max(costs[x] for x in chosen if x is not None)
                after = tuple(
                    tuple(n + (i == x) for i, n in enumerate(counts))
                    for counts, x in zip(state, chosen, strict=True)
                )
                heapq.heappush(waiting, (spent + lasts, after))


halves = st.integers(1, 6).map(lambda n: n / 2)


@settings(max_examples=25)
@given(st.data())
def test_no_table_of_a_small_pipeline_is_shorter(data):
    p, m = data.draw(st.sampled_from([(1, 3), (2, 2), (2, 3), (3, 2)]))
    costs = [data.draw(halves) for _ in "FBW"]
    most = data.draw(st.integers(1, 2 * p - 1))
    table = js.schedules.lockstep(p, m, most_stash=most, **times(*costs))
    found = table.simulate(**times(*costs), lockstep=True).time
    assert found == pytest.approx(least_time(p, m, costs, most))
