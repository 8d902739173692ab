"""A search for tables that lose little in lockstep: a beam, tick by tick."""

from dataclasses import dataclass
from itertools import permutations

import numpy as np

from ..table import CostTable, Kind
from ._build import Step

_KINDS: tuple[Kind, ...] = ("F", "B", "W")
# How much the stages count that are not the busiest, when states are compared. Neither is always
# the better one.
_WEIGHTS = (0.0, 0.3)
_MOST_WIDTH, _LEAST_WIDTH = 128, 4
_EFFORT = 2**15  # width times microbatches, stages and chunks: a quarter of a second or so

Found = tuple[float, list[list[Step | None]]]
"""The time of a table, and per device stage what it does in each tick."""


@dataclass(frozen=True)
class Problem:
    """A table to find, of one operation per stage and tick.

    `costs` are per stage of the model, of which k lies on device stage k % p. A stage may hold
    `most_stash` microbatches of a chunk, at least one of each chunk.
    """

    num_stages: int
    num_microbatches: int
    num_chunks: int
    costs: CostTable
    send: float
    most_stash: int


def search(problem: Problem) -> Found:
    """The shortest table that was found."""
    size = problem.num_stages * problem.num_microbatches * problem.num_chunks
    width = min(max(_EFFORT // size, _LEAST_WIDTH), _MOST_WIDTH)
    found = [_Beam(problem, width, weight).run() for weight in _WEIGHTS]
    return min(found, key=lambda one: one[0])


class _Beam:
    """The most promising states after each tick.

    A state is how many microbatches every option, a kind of operation of a chunk, has done on
    every stage: `counts[state, option, stage]`.
    """

    def __init__(self, problem: Problem, width: int, weight: float) -> None:
        self.problem, self.width, self.weight = problem, width, weight
        self.times = np.array(problem.costs).reshape(-1, problem.num_stages)
        self.orders, self.allowed = _rules(self.times, problem.num_chunks)
        self.counts = np.zeros((1, *self.times.shape), np.int64)
        self.spent = np.zeros(1)
        # States that have done the same have one key: a sum of random numbers of what was done.
        self.keys = np.zeros(1, np.uint64)
        random = np.random.default_rng(0)
        self.numbers = random.integers(2**63, size=self.times.shape, dtype=np.uint64)
        self.ticks: list[tuple[np.ndarray, np.ndarray]] = []  # parents, options chosen
        self.best: Found | None = None

    def run(self) -> Found:
        """Ticks until no state can be better than the best one that is done."""
        while len(self.spent):
            self._tick()
        assert self.best is not None, "a stage always has room for its oldest microbatch"
        return self.best

    def _tick(self) -> None:
        """Every state does a tick by every rule; the most promising children stay."""
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
        """Parents, options chosen (-1: idle), counts, time spent and keys of all children."""
        can = _possible(self.counts, self.problem)
        # [state, rule, option in the rule's order, stage]; the first possible one is done.
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

    def _rows(self, parent: int, chosen: np.ndarray) -> list[list[Step | None]]:
        """Per stage what it did in each tick on the way to a child of `parent`."""
        path = [chosen]
        for parents, options in reversed(self.ticks):
            path.append(options[parent])
            parent = parents[parent]
        count = np.zeros(self.times.shape, int)
        rows: list[list[Step | None]] = [[] for _ in range(self.problem.num_stages)]
        for options in reversed(path):
            for stage, option in enumerate(options):
                if option < 0:
                    rows[stage].append(None)
                    continue
                kind, chunk = divmod(int(option), self.problem.num_chunks)
                rows[stage].append(Step(_KINDS[kind], chunk, int(count[option, stage])))
                count[option, stage] += 1
        return rows


def _rules(times: np.ndarray, num_chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """What a stage prefers in a tick: the options in an order, and those that it may do at all.

    A tick is to last no longer than the longest F, or B, or W: whoever would take longer does
    something else. Within a kind, F prefers the chunk nearest to the loss, B the one farthest.

    Returns:
      `[rule, option]` and `[rule, option in that order, stage]`.
    """
    chunks = range(num_chunks)
    of_kind = [
        [num_chunks - 1 - chunk for chunk in chunks],
        [num_chunks + chunk for chunk in chunks],
        [2 * num_chunks + chunk for chunk in chunks],
    ]
    rules = []
    for limit in sorted({times[options].max() for options in of_kind}):
        usable = [kind for kind in range(3) if (times[of_kind[kind]] <= limit).any()]
        for kinds in permutations(usable):
            others = [kind for kind in range(3) if kind not in usable]
            order = [option for kind in [*kinds, *others] for option in of_kind[kind]]
            rules.append((order, times[order] <= limit))
    orders, allowed = zip(*rules, strict=True)
    return np.array(orders), np.array(allowed)


def _possible(counts: np.ndarray, problem: Problem) -> np.ndarray:
    """Which options have what they need: `[state, option, stage]`."""
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
    """Whether F of each chunk fits, with what the stage's oldest microbatch still needs.

    Without that reserve younger microbatches could fill the stash, and none would be done.
    """
    forward, weight = counts[:, :num_chunks], counts[:, 2 * num_chunks :]
    held = (forward - weight).sum(1, keepdims=True)
    is_oldest = forward == forward[:, -1:]
    reserve = is_oldest.sum(1, keepdims=True)
    return held + reserve + np.where(is_oldest, 0, 1) <= most_stash


def _time_left(left: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Per state and stage, about the least time until all is done.

    All that the stage has left; or its F and B, and then the way of its last gradient to the
    first stage, beside which so many of its W are done.
    """
    num_chunks = len(times) // 3
    work = left * times
    whole = work.sum(1)
    before = work[:, : 2 * num_chunks].sum(1)
    stage = np.arange(times.shape[1])
    first = times[num_chunks]
    way = np.cumsum(first) - first  # of a gradient from each stage to the first
    longest = times[2 * num_chunks :].max(0)
    weights = left[:, 2 * num_chunks :].sum(1)
    beside = np.clip(weights - 1, 0, stage)
    slower = np.maximum(longest - first, 0)
    tail = way + times[2 * num_chunks, 0] + beside * slower + (weights - 1 - beside) * longest
    has_gradients = left[:, num_chunks] > 0
    return np.where(has_gradients, np.maximum(whole, before + tail), whole)
