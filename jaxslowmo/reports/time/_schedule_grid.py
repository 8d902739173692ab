"""Draw a schedule as text: a row per stage, a column per tick, in blocks of limited width."""

from collections.abc import Sequence

from ..._support.checks import checks_flags
from ...pipeline.schedules import Operation, Schedule

# A schedule of more blocks than these is shortened to its begin and its end: the steady state
# between them repeats itself.
_FIRST_BLOCKS, _LAST_BLOCKS = 4, 2


def schedule_title(schedule: Schedule) -> str:
    """Return the name of a schedule with its sizes."""
    chunks = f", {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    return (
        f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} "
        f"microbatches{chunks}"
    )


@checks_flags("schedule_grid")
def schedule_grid(schedule: Schedule, *, width: int = 100, whole: bool = False) -> str:
    """Return a schedule as text: a row per stage, a column per tick of `Schedule.ticks`.

    Letters are torch's: F3 is the forward pass of microbatch 3, I3 the gradient of its input, W3
    that of the weights, B3 both in one; 1F3 is F3 of chunk 1, where stages have several; "." is
    idle.

    Args:
      schedule: the schedule.
      width: characters per line; ticks that do not fit continue in a block below.
      whole: whether to show all blocks; otherwise only the first four and the last two.

    Returns:
      The lines, without a line feed at the end.

    Example:
      >>> print(schedule_grid(js.schedules.zero_bubble(2, 2)))
      ticks 0 to 6
      0 | F0 F1 .  I0 W0 I1 W1
      1 | .  F0 I0 F1 I1 W0 W1
    """
    ticks = [[_text(schedule, cell) for cell in tick] for tick in schedule.ticks()]
    wide = max(len(text) for tick in ticks for text in tick)
    label = len(str(schedule.num_stages - 1))
    across = max((width - label - 2) // (wide + 1), 1)
    starts = list(range(0, len(ticks), across))
    hidden = [] if whole else starts[_FIRST_BLOCKS : len(starts) - _LAST_BLOCKS]
    lines: list[str] = []
    for start in starts:
        if start in hidden:
            if start == hidden[0]:
                lines.append(f"ticks {start} to {hidden[-1] + across - 1} are not shown")
            continue
        block = ticks[start : start + across]
        lines.append(f"ticks {start} to {start + len(block) - 1}")
        for stage in range(schedule.num_stages):
            texts = " ".join(f"{tick[stage]:{wide}}" for tick in block)
            lines.append(f"{stage:{label}d} | {texts}".rstrip())
    return "\n".join(lines)


def _text(schedule: Schedule, cell: Sequence[Operation]) -> str:
    """Return the name of what a stage does in a tick, which may be an F and a B."""
    return (
        "+".join(
            f"{op.chunk if schedule.num_chunks > 1 else ''}{op.letter}{op.microbatch}"
            for op in cell
        )
        or "."
    )
