"""Tables made for lockstep, in which a tick lasts as long as its longest operation."""

from dataclasses import replace

from ..table import Costs, CostTable, Schedule, as_size, as_sizes, as_time, cost_table
from ._build import Step, build, round_robin
from ._flat import gpipe, one_f_one_b
from ._interleaved import interleaved
from ._search import Problem, search
from ._zero_bubble import zero_bubble


def lockstep(
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    most_stash: int | None = None,
    forward: Costs = 1.0,
    backward_input: Costs = 1.0,
    backward_weight: Costs = 1.0,
    send: float = 0.0,
) -> Schedule:
    """The table that loses least in lockstep, of those that a search finds.

    In one program all stages begin a tick together, so that under the orders of stages that run
    free one stage's F waits for its neighbour's B in every tick. The search keeps a beam of
    partial tables and adds tick by tick; what it finds is compared with ticks of one F and one
    backward pass and with the other kinds, and the shortest table within the limit is taken. So
    it is never worse than ticks of one F and one B, whose time is (m + p - 1) (F + B + W), where
    the limit is at least 2 p - 1. Of tables that are equal under the given times the one is taken
    that is shorter where B and W take longer. For 8 stages and 64 microbatches the search takes
    about a second.

    Args:
      num_stages: device stages, p >= 1.
      num_microbatches: microbatches of a step, m >= 1.
      num_chunks: stages of the model per device stage, v >= 1; stage k of the model lies on
        device stage k % p.
      most_stash: the most microbatches of a chunk that a stage may hold, >= num_chunks; None:
        num_chunks (2 p - 1).
      forward: time of F, as `Schedule.simulate` takes it; only ratios count.
      backward_input: time of B.
      backward_weight: time of W.
      send: what every tick takes besides.

    Returns:
      A `Schedule` whose columns are ticks (`lockstep=True`).

    Raises:
      ValueError: a size below 1, a limit below num_chunks, or times as `simulate` refuses them.
    """
    num_stages, num_microbatches, num_chunks = as_sizes(num_stages, num_microbatches, num_chunks)
    if most_stash is None:
        most_stash = num_chunks * (2 * num_stages - 1)
    elif as_size("most_stash", most_stash) < num_chunks:
        raise ValueError(
            "`most_stash` must have room for a microbatch of each of the chunks, "
            f"{num_chunks}, got {most_stash}."
        )
    placement = round_robin(num_stages, num_chunks)
    costs = cost_table(
        placement,
        num_stages,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
    )
    sizes = num_stages, num_microbatches, num_chunks
    problem = Problem(*sizes, costs, as_time("send", send), int(most_stash))
    # Where kinds take equally long, any order of them looks alike, and is worse as soon as they do
    # not. So a table is looked for under unlike costs, too, and of equals the one is taken that is
    # shortest under those.
    apart = replace(problem, costs=_unlike(costs))
    tables = [
        build("lockstep", search(one)[1], num_microbatches, placement, lockstep=True)
        for one in (problem, apart)
    ]
    tables += [table for table in _known(problem) if max(table.stash) <= most_stash]
    return min(tables, key=lambda t: (_time(t, problem), _time(t, apart), len(t.ticks())))


def _unlike(costs: CostTable) -> CostTable:
    """The work of each stage with F, B and W as 1 to 1.5 to 1.2."""
    work = [sum(times) for times in zip(*costs, strict=True)]
    return CostTable(tuple(work), tuple(1.5 * w for w in work), tuple(1.2 * w for w in work))


def _time(table: Schedule, problem: Problem) -> float:
    """In lockstep, rounded so that equal times compare as such."""
    time = table.simulate(**problem.costs._asdict(), send=problem.send, lockstep=True).time
    return round(time / sum(map(sum, problem.costs)), 9)


def _known(problem: Problem) -> list[Schedule]:
    """Tables that need no search, as tables of ticks."""
    sizes = problem.num_stages, problem.num_microbatches, problem.num_chunks
    others = [gpipe(*sizes)]
    if problem.num_chunks == 1:
        others += [one_f_one_b(*sizes), zero_bubble(*sizes), zero_bubble(*sizes, memory=2)]
    if problem.num_microbatches % problem.num_stages == 0:
        others.append(interleaved(*sizes))
    known = [_in_ticks(other) for other in others]
    return known + [_one_f_and_one_b(*sizes[:2])] * (problem.num_chunks == 1)


def _in_ticks(other: Schedule) -> Schedule:
    rows = zip(*other.ticks(), strict=True)
    return Schedule(
        "lockstep",
        other.num_stages,
        other.num_microbatches,
        other.num_chunks,
        other.placement,
        tuple(rows),
        lockstep=True,
    )


def _one_f_and_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """In turn a column in which all stages do F, and one in which they do a backward pass."""
    rows: list[list[Step | None]] = []
    for stage in range(num_stages):
        row: list[Step | None] = []
        for turn in range(num_microbatches + 2 * (num_stages - 1)):
            forward, backward = turn - stage, turn - 2 * (num_stages - 1) + stage
            row.append(Step("F", 0, forward) if 0 <= forward < num_microbatches else None)
            row.append(Step("BW", 0, backward) if 0 <= backward < num_microbatches else None)
        rows.append(row)
    return build("lockstep", rows, num_microbatches, tuple(range(num_stages)), lockstep=True)
