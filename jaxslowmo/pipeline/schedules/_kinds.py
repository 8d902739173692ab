"""The schedules of the papers: GPipe, 1F1B, interleaved, zero-bubble and ZB-V."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..._support.checks import checks_flags
from ._operations import Kind, Operation, check_chunks, checked_sizes
from ._schedule import Schedule


class RowEntry(NamedTuple):
    """An operation without its device stage, which is the index of its row."""

    kind: Kind
    chunk: int
    microbatch: int


def build(
    name: str,
    rows: Sequence[Sequence[RowEntry | None]],
    num_microbatches: int,
    placement: tuple[int, ...],
    *,
    lockstep: bool = False,
) -> Schedule:
    """Return the schedule in which device stage s runs `rows[s]`; a None entry is idle."""
    cells = tuple(
        tuple(() if step is None else (Operation(step.kind, stage, *step[1:]),) for step in row)
        for stage, row in enumerate(rows)
    )
    num_chunks = len(placement) // len(rows)
    return Schedule(name, len(rows), num_microbatches, num_chunks, placement, cells, lockstep)


def round_robin(num_stages: int, num_chunks: int) -> tuple[int, ...]:
    """Return the placement of model stage k on device stage k % num_stages."""
    return tuple(range(num_stages)) * num_chunks


@checks_flags("schedules.gpipe")
def gpipe(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, *, forward_only: bool = False
) -> Schedule:
    """Make the GPipe schedule: all forward passes, then all backward passes.

    The bubble is (p - 1) / (v m + p - 1) for p stages, m microbatches and v chunks (m >= p), and
    every stage holds all m microbatches of all of its chunks.

    Args:
      num_stages: device stages, p >= 1.
      num_microbatches: microbatches of a step, m >= 1.
      num_chunks: stages of the model per device stage, v >= 1; stage k of the model is placed
        on device stage k % p (a circular pipeline).
      forward_only: whether to leave out backward passes, as for evaluation.

    Returns:
      A `Schedule`.

    Raises:
      ValueError: a size below 1.
    """
    num_stages, num_microbatches, num_chunks = checked_sizes(
        num_stages, num_microbatches, num_chunks
    )
    forward = [RowEntry("F", c, i) for c in range(num_chunks) for i in range(num_microbatches)]
    backward = [
        RowEntry("BW", c, i) for c in reversed(range(num_chunks)) for i in range(num_microbatches)
    ]
    row = forward if forward_only else forward + backward
    return build("gpipe", [row] * num_stages, num_microbatches, round_robin(num_stages, num_chunks))


@checks_flags("schedules.one_f_one_b")
def one_f_one_b(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, *, forward_only: bool = False
) -> Schedule:
    """Make Megatron's 1F1B schedule: after a warm-up, one F and one backward pass alternate.

    The bubble is GPipe's, (p - 1) / (m + p - 1), but stage s holds only min(p - s, m) microbatches.
    It suits stages that each start as soon as they can; for stages in lockstep see `lockstep`.

    Args:
      num_stages: device stages, p >= 1.
      num_microbatches: microbatches of a step, m >= 1.
      num_chunks: must be 1; for more use `interleaved`.
      forward_only: whether to leave out backward passes, as for evaluation.

    Returns:
      A `Schedule`.

    Raises:
      ValueError: a size below 1, or several chunks.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, arXiv 2006.09503.
    """
    num_stages, num_microbatches, num_chunks = checked_sizes(
        num_stages, num_microbatches, num_chunks
    )
    check_chunks("one_f_one_b", num_chunks, 1, "use 'interleaved' for more")
    rows = [
        _stage_row(num_microbatches, num_stages - 1 - stage, forward_only)
        for stage in range(num_stages)
    ]
    return build("one_f_one_b", rows, num_microbatches, round_robin(num_stages, 1))


def _stage_row(num_microbatches: int, warm_up: int, forward_only: bool) -> list[RowEntry]:
    forward = [RowEntry("F", 0, i) for i in range(num_microbatches)]
    if forward_only:
        return forward
    warm_up = min(warm_up, num_microbatches)
    row = forward[:warm_up]
    for index in range(num_microbatches):
        row += [*forward[warm_up + index : warm_up + index + 1], RowEntry("BW", 0, index)]
    return row


@checks_flags("schedules.interleaved")
def interleaved(
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    warm_up: Literal["few", "all"] = "few",
    forward_only: bool = False,
) -> Schedule:
    """Make Megatron's interleaved schedule: v chunks per stage, p microbatches per turn.

    A turn is p microbatches of one chunk. The bubble is (p - 1) / (v m + p - 1), about 1 / v of
    that of `one_f_one_b`, for v times its messages. Idle columns are where torch has them.

    Args:
      num_stages: device stages, p >= 1.
      num_microbatches: microbatches of a step, m; a multiple of p.
      num_chunks: stages of the model per device stage, v >= 1; stage k of the model is placed
        on device stage k % p.
      warm_up: forward passes before the first backward pass: "few" is Megatron's number,
        2 (p - s - 1) + (v - 1) p on stage s; "all" is all of them, as in ColossalAI for m = p.
      forward_only: whether to leave out backward passes, as for evaluation.

    Returns:
      A `Schedule`.

    Raises:
      ValueError: a size below 1, m that p does not divide, or an unknown `warm_up`.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters,
      arXiv 2104.04473, section 2.2.
    """
    num_stages, num_microbatches, num_chunks = checked_sizes(
        num_stages, num_microbatches, num_chunks
    )
    if num_microbatches % num_stages:
        raise ValueError(
            "interleaved: `num_microbatches` must be a multiple of `num_stages` "
            f"({num_stages}), got {num_microbatches}."
        )
    if warm_up not in ("few", "all"):
        raise ValueError(f'`warm_up` must be "few" or "all", got {warm_up!r}.')
    # (chunk, microbatch) in order: `num_stages` microbatches of a chunk, then of the next chunk.
    per_turn = num_stages * num_chunks
    turns = [
        (k % per_turn // num_stages, k // per_turn * num_stages + k % num_stages)
        for k in range(num_microbatches * num_chunks)
    ]
    forward = [RowEntry("F", chunk, i) for chunk, i in turns]
    backward = [RowEntry("BW", num_chunks - 1 - chunk, i) for chunk, i in turns]
    if forward_only:
        rows = [forward] * num_stages
    elif warm_up == "all":
        rows = [forward + backward] * num_stages
    else:
        rows = [
            _interleaved_row(stage, num_stages, num_chunks, forward, backward)
            for stage in range(num_stages)
        ]
    return build("interleaved", rows, num_microbatches, round_robin(num_stages, num_chunks))


def _interleaved_row(
    stage: int, num_stages: int, num_chunks: int, forward: list[RowEntry], backward: list[RowEntry]
) -> list[RowEntry | None]:
    """Return the row of one stage: warm-up, F and B in turn, the remaining backward passes."""
    below = num_stages - 1 - stage
    warm = min(2 * below + (num_chunks - 1) * num_stages, len(forward))
    # The first gradient arrives no earlier than this column: p microbatches of all chunks, and
    # the way to the last stage and back. The idle columns are torch's.
    first_backward = num_chunks * num_stages + 2 * below
    row: list[RowEntry | None] = [None] * stage
    row += forward[:warm]
    row += [None] * (first_backward - warm - stage if warm else 0)
    for index, step in enumerate(backward):
        if warm + index < len(forward):
            row += [forward[warm + index], step]
        else:  # an idle column, in which other stages still run an F
            row += [None, step]
    return row


def zero_bubble(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, *, memory: int = 1
) -> Schedule:
    """Make the ZB-H1 or ZB-H2 schedule, in which gradients of weights fill the bubble.

    A stage passes the gradient of its input on before it computes that of its weights, which on
    stage s waits for s (H1) or 2 s (H2) more microbatches. The bubble is
    (p - 1) (F + B - W) long with H1 and (p - 1) (F + B - 2 W) with H2, if that is not negative and
    m is large enough. H1 holds p microbatches on every stage, like the first stage of 1F1B; H2
    holds 2 p - 1.

    Args:
      num_stages: device stages, p >= 1.
      num_microbatches: microbatches of a step, m >= 1.
      num_chunks: must be 1; for two use `zbv`.
      memory: 1 for H1, 2 for H2.

    Returns:
      A `Schedule`.

    Raises:
      ValueError: a size below 1, several chunks, or another `memory`.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2. Its automatic
      scheduler with twice the memory (ZB-2p) is not implemented.
    """
    num_stages, num_microbatches, num_chunks = checked_sizes(
        num_stages, num_microbatches, num_chunks
    )
    check_chunks("zero_bubble", num_chunks, 1, "use 'zbv' for two")
    if isinstance(memory, bool) or memory not in (1, 2):
        raise ValueError(f"`memory` must be 1 (ZB-H1) or 2 (ZB-H2), got {memory!r}.")
    memory = int(memory)
    rows = [
        _zero_bubble_row(num_microbatches, memory * (num_stages - 1 - stage), memory * stage)
        for stage in range(num_stages)
    ]
    return build("zero_bubble", rows, num_microbatches, round_robin(num_stages, 1))


def _zero_bubble_row(num_microbatches: int, warm_up: int, delay: int) -> list[RowEntry | None]:
    row: list[RowEntry | None] = [
        RowEntry("F", 0, i) for i in range(min(warm_up, num_microbatches))
    ]
    for index in range(num_microbatches):
        if warm_up + index < num_microbatches:
            row.append(RowEntry("F", 0, warm_up + index))
        row.append(RowEntry("B", 0, index))
        if index >= delay:
            row.append(RowEntry("W", 0, index - delay))
    late = range(max(num_microbatches - delay, 0), num_microbatches)
    return row + [RowEntry("W", 0, index) for index in late]


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
    num_stages, num_microbatches, num_chunks = checked_sizes(
        num_stages, num_microbatches, num_chunks
    )
    check_chunks("zbv", num_chunks, 2, "a V has two arms")
    # The rows are made for enough microbatches to fill the V; operations of microbatches that the
    # step does not have become idle cells.
    full = max(num_microbatches, 2 * num_stages - 1)
    rows = [
        [step if step and step.microbatch < num_microbatches else None for step in row]
        for row in (_zbv_row(stage, num_stages, full) for stage in range(num_stages))
    ]
    down_and_up = (*range(num_stages), *reversed(range(num_stages)))
    return build("zbv", rows, num_microbatches, down_and_up)


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
