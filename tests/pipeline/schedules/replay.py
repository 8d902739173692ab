"""A table done operation by operation, by no code of the package."""

import re

_OPERATION = re.compile(r"(\d+)([FIWB])(\d+)")


def parsed(order):
    """The operations of one line of torch's notation: (stage of the model, letter, microbatch)."""
    found = [_OPERATION.findall(cell) for cell in order.split(",")]
    return [(int(k), letter, int(j)) for cell in found for k, letter, j in cell]


def replayed(orders, num_model_stages):
    """Every stage does one operation whenever it can, until none can.

    Returns:
      All operations in the order in which they were done, and per stage the most that it held from
      F to W or B.
    """
    rows = [parsed(order) for order in orders]
    held, most = [0] * len(rows), [0] * len(rows)
    done: list = []
    while True:
        before = len(done)
        for stage, row in enumerate(rows):
            if row and all(need in done for need in _needs(row[0], num_model_stages, done)):
                operation = row.pop(0)
                done.append(operation)
                held[stage] += operation[1] == "F"
                most[stage] = max(most[stage], held[stage])
                held[stage] -= operation[1] in "WB"
        if len(done) == before:
            assert not any(rows), f"stages wait for ever: {[row[:1] for row in rows]}"
            return done, most


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
