"""Find a table for stages in lockstep by a beam search over ticks."""

from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from ..._support.checks import checked_int
from ._kinds import RowEntry, build, gpipe, interleaved, one_f_one_b, round_robin, zero_bubble
from ._operations import Costs, CostTable, Kind, as_time, checked_sizes, cost_table
from ._schedule import Schedule

_KINDS: tuple[Kind, ...] = ("F", "B", "W")
# The weight of the mean over all stages when states are compared; the busiest stage has weight 1.
# Both values are tried, as neither is always the better one.
_WEIGHTS = (0.0, 0.3)
_MOST_WIDTH, _LEAST_WIDTH = 128, 4
_EFFORT = 2**15  # beam width * microbatches * stages * chunks: about a quarter of a second

_TimedRows = tuple[float, list[list[RowEntry | None]]]
"""The time of a table, and its rows: the operation of each device stage in each tick."""


@dataclass(frozen=True)
class _Problem:
    """The problem to solve: a table with at most one operation per stage and tick.

    `costs` are per stage of the model; stage k is placed on device stage k % p. A device stage
    may hold `most_stash` microbatches of a chunk, at least one of each chunk.
    """

    num_stages: int
    num_microbatches: int
    num_chunks: int
    costs: CostTable
    send: float
    most_stash: int


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
    """Search for the schedule that takes the least time when stages run in lockstep.

    In one program all stages begin a tick together. With a schedule that is made for stages that
    run freely, such as 1F1B, one stage's F then waits for its neighbour's B in every tick. The
    search keeps a beam of partial tables and extends them tick by tick. Its result is compared with
    ticks of one F and one backward pass and with the other kinds, and the shortest table within the
    limit is returned. So the result is never worse than ticks of one F and one B, which take
    (m + p - 1) (F + B + W), if the limit is at least 2 p - 1. Of tables that take equally long
    under the given times, the one that is shorter where B and W take longer is returned. For 8
    stages and 64 microbatches the search takes about a second.

    Args:
      num_stages: device stages, p >= 1.
      num_microbatches: microbatches of a step, m >= 1.
      num_chunks: stages of the model per device stage, v >= 1; stage k of the model is placed
        on device stage k % p.
      most_stash: the most microbatches of a chunk that a stage may hold, >= num_chunks; None:
        num_chunks (2 p - 1).
      forward: time of F, in any form that `Schedule.simulate` takes; only ratios count.
      backward_input: time of B.
      backward_weight: time of W.
      send: time that every tick takes in addition.

    Returns:
      A `Schedule` whose columns are ticks (`lockstep=True`).

    Raises:
      ValueError: a size below 1, a limit below num_chunks, or times that `simulate` refuses.
    """
    num_stages, num_microbatches, num_chunks = checked_sizes(
        num_stages, num_microbatches, num_chunks
    )
    if most_stash is None:
        most_stash = num_chunks * (2 * num_stages - 1)
    elif checked_int("`most_stash`", most_stash, 1) < num_chunks:
        raise ValueError(
            f"`most_stash` must be at least `num_chunks`={num_chunks}, got {most_stash}."
        )
    placement = round_robin(num_stages, num_chunks)
    costs = cost_table(placement, num_stages, forward, backward_input, backward_weight)
    sizes = num_stages, num_microbatches, num_chunks
    problem = _Problem(*sizes, costs, as_time("send", send), int(most_stash))
    # If all kinds of operations take equally long, many tables tie that differ as soon as the times
    # do. So a second search uses unequal times, and these also break ties.
    unequal = replace(problem, costs=_unequal_costs(costs))
    tables = [
        build("lockstep", _search(one)[1], num_microbatches, placement, lockstep=True)
        for one in (problem, unequal)
    ]
    tables += [table for table in _other_tables(problem) if max(table.stash) <= most_stash]
    return min(tables, key=lambda t: (_time(t, problem), _time(t, unequal), len(t.ticks())))


def _unequal_costs(costs: CostTable) -> CostTable:
    """Return costs with F : B : W = 1 : 1.5 : 1.2, proportional to the work of each stage."""
    work = [sum(times) for times in zip(*costs, strict=True)]
    return CostTable(tuple(work), tuple(1.5 * w for w in work), tuple(1.2 * w for w in work))


def _time(table: Schedule, problem: _Problem) -> float:
    """Return the time of a table in lockstep, rounded so that equal times compare equal."""
    time = table.simulate(**problem.costs._asdict(), send=problem.send, lockstep=True).time
    return round(time / sum(map(sum, problem.costs)), 9)


def _other_tables(problem: _Problem) -> list[Schedule]:
    """Return the tables that need no search, as tables of ticks."""
    sizes = problem.num_stages, problem.num_microbatches, problem.num_chunks
    others = [gpipe(*sizes)]
    if problem.num_chunks == 1:
        others += [one_f_one_b(*sizes), zero_bubble(*sizes), zero_bubble(*sizes, memory=2)]
    if problem.num_microbatches % problem.num_stages == 0:
        others.append(interleaved(*sizes))
    tables = [_as_lockstep(other) for other in others]
    return tables + [_one_f_and_one_b(*sizes[:2])] * (problem.num_chunks == 1)


def _as_lockstep(other: Schedule) -> Schedule:
    rows = tuple(zip(*other.ticks(), strict=True))
    return replace(other, name="lockstep", cells=rows, lockstep=True)


def _one_f_and_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the table whose columns alternate: all stages do F, then all do a backward pass."""
    rows: list[list[RowEntry | None]] = []
    for stage in range(num_stages):
        row: list[RowEntry | None] = []
        for turn in range(num_microbatches + 2 * (num_stages - 1)):
            forward, backward = turn - stage, turn - 2 * (num_stages - 1) + stage
            row.append(RowEntry("F", 0, forward) if 0 <= forward < num_microbatches else None)
            row.append(RowEntry("BW", 0, backward) if 0 <= backward < num_microbatches else None)
        rows.append(row)
    return build("lockstep", rows, num_microbatches, tuple(range(num_stages)), lockstep=True)


def _search(problem: _Problem) -> _TimedRows:
    """Return the shortest table that a beam search finds."""
    size = problem.num_stages * problem.num_microbatches * problem.num_chunks
    width = min(max(_EFFORT // size, _LEAST_WIDTH), _MOST_WIDTH)
    results = [_Beam(problem, width, weight).run() for weight in _WEIGHTS]
    return min(results, key=lambda one: one[0])


class _Beam:
    """A beam search, which keeps the most promising states after each tick.

    An option is a kind of operation of a chunk. A state is the number of microbatches for which
    each option is done on each stage: `counts[state, option, stage]`.
    """

    def __init__(self, problem: _Problem, width: int, weight: float) -> None:
        self.problem, self.width, self.weight = problem, width, weight
        self.times = np.array(problem.costs).reshape(-1, problem.num_stages)
        self.orders, self.allowed = _rules(self.times, problem.num_chunks)
        self.counts = np.zeros((1, *self.times.shape), np.int64)
        self.spent = np.zeros(1)
        # A state's key is a hash of its counts: the sum of one random number per operation done.
        self.keys = np.zeros(1, np.uint64)
        random = np.random.default_rng(0)
        self.numbers = random.integers(2**63, size=self.times.shape, dtype=np.uint64)
        self.ticks: list[tuple[np.ndarray, np.ndarray]] = []  # parents, options chosen
        self.best: _TimedRows | None = None

    def run(self) -> _TimedRows:
        """Run ticks until no state can beat the best finished one, and return that."""
        while len(self.spent):
            self._tick()
        assert self.best is not None, "a stage always has room for its oldest microbatch"
        return self.best

    def _tick(self) -> None:
        """Advance every state by a tick under every rule; keep the most promising children."""
        parents, chosen, counts, spent, keys = self._children()
        left = self.problem.num_microbatches - counts
        estimate = _time_left(left, self.times)
        done = ~left.any((1, 2))
        for child in np.flatnonzero(done):
            if self.best is None or spent[child] < self.best[0]:
                self.best = float(spent[child]), self._rows(parents[child], chosen[child])
        least = spent + estimate.max(1)
        worth = ~done if self.best is None else ~done & (least < self.best[0] * (1 - 1e-9))
        index = np.flatnonzero(worth)
        promise = least[index] + self.weight * estimate[index].mean(1)
        index = index[np.argsort(promise, kind="stable")[: self.width]]
        self.counts, self.spent, self.keys = counts[index], spent[index], keys[index]
        self.ticks.append((parents[index], chosen[index]))

    def _children(self) -> tuple[np.ndarray, ...]:
        """Return parents, chosen options (-1: idle), counts, times and keys of all children."""
        can = _possible_options(self.counts, self.problem)
        # [state, rule, option in the rule's order, stage]; a stage runs its first possible option.
        possible = can[:, self.orders] & self.allowed
        first = possible.argmax(2)
        works = np.any(possible, axis=2)
        chosen = np.take_along_axis(self.orders[None, :, :, None], first[:, :, None], 2)[:, :, 0]
        stages = np.arange(self.times.shape[1])
        lasts = np.where(works, self.times[chosen, stages], 0.0).max(2) + self.problem.send
        keys = self.keys[:, None] + np.where(works, self.numbers[chosen, stages], 0).sum(2)
        state, rule = np.nonzero(works.any(2))
        spent = self.spent[state] + lasts[state, rule]
        keys = keys[state, rule]
        cheapest = np.lexsort((spent, keys))
        kept = cheapest[np.r_[True, np.diff(keys[cheapest]) != 0]] if len(cheapest) else cheapest
        state, rule = state[kept], rule[kept]
        chosen = np.where(works, chosen, -1)[state, rule]
        counts = self.counts[state]
        child, stage = np.nonzero(chosen >= 0)
        counts[child, chosen[child, stage], stage] += 1
        return state, chosen, counts, spent[kept], keys[kept]

    def _rows(self, parent: int, chosen: np.ndarray) -> list[list[RowEntry | None]]:
        """Return each stage's operation in each tick on the path to a child of `parent`."""
        path = [chosen]
        for parents, options in reversed(self.ticks):
            path.append(options[parent])
            parent = parents[parent]
        count = np.zeros(self.times.shape, int)
        rows: list[list[RowEntry | None]] = [[] for _ in range(self.problem.num_stages)]
        for options in reversed(path):
            for stage, option in enumerate(options):
                if option < 0:
                    rows[stage].append(None)
                    continue
                kind, chunk = divmod(int(option), self.problem.num_chunks)
                rows[stage].append(RowEntry(_KINDS[kind], chunk, int(count[option, stage])))
                count[option, stage] += 1
        return rows


def _rules(times: np.ndarray, num_chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rules of a tick: an order of preference for options, and which are allowed.

    A rule limits a tick to the time of the longest F, or B, or W: a stage on which an option takes
    longer chooses another one. Within a kind, F prefers the chunk nearest to the loss, B and W the
    one farthest from it.

    Returns:
      `[rule, option]` and `[rule, option in that order, stage]`.
    """
    of_kind = np.arange(3 * num_chunks).reshape(3, num_chunks).tolist()
    of_kind[0].reverse()
    rules = []
    for limit in sorted({times[options].max() for options in of_kind}):
        usable = [kind for kind in range(3) if (times[of_kind[kind]] <= limit).any()]
        for kinds in permutations(usable):
            others = [kind for kind in range(3) if kind not in usable]
            order = [option for kind in [*kinds, *others] for option in of_kind[kind]]
            rules.append((order, times[order] <= limit))
    orders, allowed = zip(*rules, strict=True)
    return np.array(orders), np.array(allowed)


def _possible_options(counts: np.ndarray, problem: _Problem) -> np.ndarray:
    """Return which options have all their inputs: `[state, option, stage]`."""
    num_states, _, num_stages = counts.shape
    num_chunks = problem.num_chunks
    forward, backward, weight = counts.reshape(num_states, 3, -1).swapaxes(0, 1)
    can = np.empty((num_states, 3, num_chunks * num_stages), bool)
    can[:, 0] = forward < problem.num_microbatches
    can[:, 0, 1:] &= forward[:, :-1] > forward[:, 1:]
    can[:, 1] = forward > backward
    can[:, 1, :-1] &= backward[:, 1:] > backward[:, :-1]
    can[:, 2] = backward > weight
    can = can.reshape(counts.shape)
    can[:, :num_chunks] &= _has_room(counts, num_chunks, problem.most_stash)
    return can


def _has_room(counts: np.ndarray, num_chunks: int, most_stash: int) -> np.ndarray:
    """Return whether F of each chunk fits, with room for the stage's oldest microbatch.

    Without that reserve younger microbatches could fill the stash, and none could be completed.
    """
    forward, weight = counts[:, :num_chunks], counts[:, 2 * num_chunks :]
    held = (forward - weight).sum(1, keepdims=True)
    is_oldest = forward == forward[:, -1:]
    reserve = is_oldest.sum(1, keepdims=True)
    return held + reserve + np.where(is_oldest, 0, 1) <= most_stash


def _time_left(left: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return an estimate of the least time until all is done, per state and stage.

    It is the larger of two: the time of all work that the stage has left; and that of its F and B,
    followed by the way of its last gradient to the first stage, during which it can run some W.
    """
    num_chunks = len(times) // 3
    work = left * times
    whole = work.sum(1)
    before = work[:, : 2 * num_chunks].sum(1)
    stage = np.arange(times.shape[1])
    first = times[num_chunks]
    way = np.cumsum(first) - first  # time of a gradient from each stage to the first
    longest = times[2 * num_chunks :].max(0)
    weights = left[:, 2 * num_chunks :].sum(1)
    hidden = np.clip(weights - 1, 0, stage)
    slower = np.maximum(longest - first, 0)
    tail = way + times[2 * num_chunks, 0] + hidden * slower + (weights - 1 - hidden) * longest
    has_gradients = left[:, num_chunks] > 0
    return np.where(has_gradients, np.maximum(whole, before + tail), whole)
