"""The ZB-V schedule: two chunks per stage in the shape of a V, with separate B and W."""

from collections import Counter

from ._basic import RowEntry, build, v_placement
from ._operations import Kind, as_sizes, check_chunks
from ._schedule import Schedule


def zbv(num_stages: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Make the ZB-V schedule: device stage s holds stages s and 2 p - 1 - s of the model.

    So the first device stage has both the input and the loss. With F = B = W there is no bubble for
    m >= 2 p - 1. No stage holds more than 2 p microbatches of one chunk, which is as much memory
    as p microbatches on the first stage of 1F1B. Order and idle columns are torch's.

    Args:
      num_stages: device stages, p >= 1.
      num_microbatches: microbatches of a step, m >= 1.
      num_chunks: must be 2.

    Returns:
      A `Schedule`.

    Raises:
      ValueError: a size below 1, or other chunks than two.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.
    """
    num_stages, num_microbatches, num_chunks = as_sizes(num_stages, num_microbatches, num_chunks)
    check_chunks("zbv", num_chunks, 2, "a V has two arms")
    # The rows are made for enough microbatches to fill the V; operations of microbatches that the
    # step does not have become idle cells.
    full = max(num_microbatches, 2 * num_stages - 1)
    rows = [
        [step if step and step.microbatch < num_microbatches else None for step in row]
        for row in (_zbv_row(stage, num_stages, full) for stage in range(num_stages))
    ]
    return build("zbv", rows, num_microbatches, v_placement(num_stages))


def _zbv_row(stage: int, num_stages: int, num_microbatches: int) -> list[RowEntry | None]:
    below = num_stages - stage
    row: list[RowEntry | None] = [None] * stage
    count: Counter[tuple[Kind, int]] = Counter()

    def add(*steps: tuple[Kind, int]) -> None:
        """Append operations, each of the next microbatch of its kind and chunk."""
        for kind, chunk in steps:
            row.append(RowEntry(kind, chunk, count[kind, chunk]))
            count[kind, chunk] += 1

    down: tuple[Kind, int] = ("F", 0)
    back_down: tuple[tuple[Kind, int], ...] = ("B", 0), ("W", 0)
    up: tuple[tuple[Kind, int], ...] = ("F", 1), ("B", 1), ("W", 1)
    add(*[down] * (2 * below - 1))
    for _ in range(stage):
        add(("F", 1), down)
    for _ in range(below):
        add(*up)
    while count["F", 1] < num_microbatches:
        add(*[down] * (count[down] < num_microbatches), *back_down, *up)
    for _ in range(stage):
        add(("B", 0), ("B", 1))
    for _ in range(below):
        add(*back_down)
    add(*[up[-1]] * (num_microbatches - count["W", 1]))
    add(*[back_down[-1]] * (num_microbatches - count["W", 0]))
    return row
