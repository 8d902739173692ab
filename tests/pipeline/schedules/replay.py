"""A table done operation by operation, by no code of the package."""

import re
from typing import NamedTuple

_OPERATION = re.compile(r"(\d+)([FIWB])(\d+)")


class Replay(NamedTuple):
    """What was done: (stage of the model, letter, microbatch).

    Attributes:
      done: all operations, in the order in which they were done.
      most: per stage the most microbatches that it held from F to W or B.
      spans: start and end of each operation.
      sends: per stage the number of results that another stage needed.
    """

    done: list
    most: list
    spans: dict
    sends: list


def parsed(order):
    """The operations of one line of torch's notation."""
    found = [_OPERATION.findall(cell) for cell in order.split(",")]
    return [(int(k), letter, int(j)) for cell in found for k, letter, j in cell]


def replayed(orders, num_model_stages, time=lambda k, letter: 1.0, send=0.0):
    """Every stage does one operation whenever it can, until none can."""
    rows = [parsed(order) for order in orders]
    at = {k: stage for stage, row in enumerate(rows) for k, _, _ in row}
    held, free, sent = [0] * len(rows), [0.0] * len(rows), set()
    found = Replay([], [0] * len(rows), {}, [0] * len(rows))
    while True:
        before = len(found.done)
        for stage, row in enumerate(rows):
            needs = _needs(row[0], num_model_stages, found.spans) if row else [None]
            if all(need in found.spans for need in needs):
                operation = row.pop(0)
                k, letter, _ = operation
                waits = [found.spans[n][1] + send * (at[n[0]] != stage) for n in needs]
                sent |= {(n, at[n[0]]) for n in needs if at[n[0]] != stage}
                start = max([free[stage], *waits])
                free[stage] = start + time(k, letter)
                found.spans[operation] = start, free[stage]
                found.done.append(operation)
                held[stage] += letter == "F"
                found.most[stage] = max(found.most[stage], held[stage])
                held[stage] -= letter in "WB"
        if len(found.done) == before:
            assert not any(rows), f"stages wait for ever: {[row[:1] for row in rows]}"
            for _, stage in sent:
                found.sends[stage] += 1
            return found


def _needs(operation, num_model_stages, done):
    k, letter, j = operation
    if letter == "F":
        return [(k - 1, "F", j)] if k else []
    if letter == "W":
        return [(k, "I", j)]
    needed = [(k, "F", j)]
    if k + 1 < num_model_stages:
        needed.append((k + 1, "I" if (k + 1, "I", j) in done else "B", j))
    return needed


def all_once(schedule, done):
    """Whether `done` is the forward and the whole backward pass of everything, once."""
    letters = {}
    for k, letter, j in done:
        letters.setdefault((k, j), []).append(letter)
    every = {
        (k, j) for k in range(len(schedule.placement)) for j in range(schedule.num_microbatches)
    }
    allowed = [["F"]] if schedule.forward_only else [["B", "F"], ["F", "I", "W"]]
    return set(letters) == every and all(sorted(found) in allowed for found in letters.values())
